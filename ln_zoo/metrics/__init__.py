"""What models are measured by: pure functions, and metric objects that several processes share."""

from ln_zoo.metrics.pen import PenMixture
from ln_zoo.metrics.ratio import Ratio

__all__ = ["PenMixture", "Ratio"]
