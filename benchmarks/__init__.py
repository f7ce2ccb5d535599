"""Benchmarks: every provider of an operation side by side in one process, timed only after all of them agree.

`python -m benchmarks.run --help` shows how to run them, README.md how to add one.
"""
