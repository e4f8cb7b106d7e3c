"""Weights of other programs: files, rules for names and dims, placement."""
