"""The files of a run, and safe access to files, local and remote."""
