"""Steps that are made again, comparison of two runs, and the examples of a step."""
