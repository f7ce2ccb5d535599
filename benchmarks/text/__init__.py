"""Transformers trained from scratch on text."""
