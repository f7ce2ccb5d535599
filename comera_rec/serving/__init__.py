"""Serving: a trained run as one file that answers requests, with or without this library and Python."""
