"""Traced and compiled programs: reading, analysis, options and the cache."""
