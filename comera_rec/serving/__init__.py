"""Serving: a trained run exported as one file that answers requests, with or without this library and Python."""
