"""Requests to served models."""
