"""The record of a run in its workdir, and safe operations on files."""
