"""The configuration of a run: its fields, groups of options, and their checks."""
