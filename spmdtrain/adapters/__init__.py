"""Adapters from model libraries to pure functions over plain pytrees."""
