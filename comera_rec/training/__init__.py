"""Training: batches from Parquet, the trainer, metrics, checkpoints and the report of finished runs."""
