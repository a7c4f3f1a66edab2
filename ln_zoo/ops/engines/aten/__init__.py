"""The engine in torch functions, for every device and dtype."""

from ln_zoo.ops.engines.aten.engine import AtenEngine

__all__ = ["AtenEngine"]
