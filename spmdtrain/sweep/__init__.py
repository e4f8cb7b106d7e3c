"""Sweeps: many runs of an experiment with different options, and their comparison."""
