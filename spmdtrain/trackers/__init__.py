"""Trackers: where a run's metrics and media go, such as TensorBoard or W&B."""
