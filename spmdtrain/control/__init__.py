"""Requests to a run in progress."""
