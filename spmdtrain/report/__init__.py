"""The page of one or several runs: curves, what was run, checkpoints, failures and samples."""
