"""Kernels of our own, one a file, each beside its twin in plain torch."""
