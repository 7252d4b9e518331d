"""Attention backends that run on any device."""
