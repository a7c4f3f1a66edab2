"""The engine in functions of torch, for every device and precision."""

from ln_zoo.ops.engines.aten.engine import AtenEngine

__all__ = ["AtenEngine"]
