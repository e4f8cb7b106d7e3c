"""Keras models on the JAX backend, imported when a Keras object is given."""
