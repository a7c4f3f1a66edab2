"""Layers with torch's signatures and semantics that take a normalisation strategy."""

from ln_zoo.layers.linear import Linear

__all__ = ["Linear"]
