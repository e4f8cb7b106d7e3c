"""Training with parameter servers: a chief, workers and servers on Ray."""
