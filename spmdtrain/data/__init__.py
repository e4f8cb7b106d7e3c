"""Datasets, the batch of each step, and batches on devices."""
