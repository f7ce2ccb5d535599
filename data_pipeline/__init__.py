"""Criteo logs to Parquet shards and a manifest; the manifest is the whole contract with training."""
