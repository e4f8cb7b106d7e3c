"""Weights of other programs: files of arrays, maps of their names, and placement on devices."""
