"""Training: configs, the trainer and its steps, metrics and checkpoints."""
