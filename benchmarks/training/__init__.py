"""Training whole models."""
