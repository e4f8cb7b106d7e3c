"""The train step: pure functions that are compiled."""
