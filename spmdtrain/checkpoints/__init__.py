"""Checkpoints: saving, verification, restoring and export."""
