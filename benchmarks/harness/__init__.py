"""Code that all benchmarks share: cases and providers, agreement before timing, clocks, memory, rows."""
