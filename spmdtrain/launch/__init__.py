"""The launcher: starts, watches and restarts the processes of a job."""
