"""Models of the zoo: LightningModules that take a normalisation strategy as ``norm``."""

from ln_zoo.models.base import ZooModule
from ln_zoo.models.mlp import MLPClassifier

__all__ = ["MLPClassifier", "ZooModule"]
