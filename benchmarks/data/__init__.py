"""Benchmarks from raw logs to a data set, and from a data set to batches."""
