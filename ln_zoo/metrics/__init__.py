"""What models are measured by: pure functions, and metric objects that several processes share."""

from ln_zoo.metrics.pen import PenMixture
from ln_zoo.metrics.ratio import Ratio
from ln_zoo.metrics.retrieval import Ranks, Retrieval, retrieval_ranks, retrieval_scores

__all__ = ["PenMixture", "Ranks", "Ratio", "Retrieval", "retrieval_ranks", "retrieval_scores"]
