"""Training of whole models."""
