"""Models of the zoo: LightningModules that take a norm as ``norm``."""

# Imported to register exports and dynamics.
from ln_zoo.models import dynamics as dynamics
from ln_zoo.models import exporting as exporting
from ln_zoo.models.attentive_reader import AttentiveReader
from ln_zoo.models.base import ZooModule
from ln_zoo.models.conv import ConvClassifier
from ln_zoo.models.draw import DRAW
from ln_zoo.models.dynamics import DynamicsTask
from ln_zoo.models.handwriting import Handwriting
from ln_zoo.models.mlp import MLPClassifier
from ln_zoo.models.order_embedding import OrderEmbedding
from ln_zoo.models.sequence import SequenceClassifier
from ln_zoo.models.skip_thought import CombinedSkipThoughts, SkipThought

__all__ = [
    "DRAW",
    "AttentiveReader",
    "CombinedSkipThoughts",
    "ConvClassifier",
    "DynamicsTask",
    "Handwriting",
    "MLPClassifier",
    "OrderEmbedding",
    "SequenceClassifier",
    "SkipThought",
    "ZooModule",
]
