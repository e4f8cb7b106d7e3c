"""The page of one or several runs: curves, program, checkpoints, failures and samples."""
