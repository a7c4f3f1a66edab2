"""Engines in functions of torch, for every device and precision."""

from ln_zoo.ops.engines.aten.draw import AtenDraw
from ln_zoo.ops.engines.aten.engine import AtenEngine

__all__ = ["AtenDraw", "AtenEngine"]
