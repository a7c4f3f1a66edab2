"""Datasets as Lightning data modules, and the loading they share."""

from ln_zoo.data.digits import Digits
from ln_zoo.data.images import ImageClassificationData
from ln_zoo.data.loading import BatchLoader, DistributedBatches, ResumableLoader, Tensors
from ln_zoo.data.mnist import MNIST

__all__ = [
    "MNIST",
    "BatchLoader",
    "Digits",
    "DistributedBatches",
    "ImageClassificationData",
    "ResumableLoader",
    "Tensors",
]
