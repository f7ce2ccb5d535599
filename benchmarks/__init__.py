"""Benchmarks: all providers of an operation side by side in one process, timed only after their results agree.

`python -m benchmarks.run --help` shows how to run them, and README.md how to add one.
"""
