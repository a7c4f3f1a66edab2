"""Shared helpers that know nothing of norms, layers and models."""
