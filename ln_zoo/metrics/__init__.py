"""Metrics: pure functions, and `torchmetrics` objects that reduce over processes."""

from ln_zoo.metrics.pen import PenMixture
from ln_zoo.metrics.ratio import Ratio
from ln_zoo.metrics.retrieval import Ranks, Retrieval, retrieval_ranks, retrieval_scores

__all__ = ["PenMixture", "Ranks", "Ratio", "Retrieval", "retrieval_ranks", "retrieval_scores"]
