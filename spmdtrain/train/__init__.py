"""Training runs: the trainer, the loop, evaluation, logs and callbacks."""
