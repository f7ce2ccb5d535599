"""Click logs, Criteo's or others, to Parquet shards and a manifest, which is the whole contract with training."""
