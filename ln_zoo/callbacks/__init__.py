"""Lightning callbacks: norms, evaluation curves, statistics, checkpoints, pictures, predictions.

Callbacks that run the model restore modes, buffers and random generators. Invalid arguments, and
models or data modules without a required method, raise ValueError.
"""

import warnings

from ln_zoo.callbacks.activity import ActivityByPosition
from ln_zoo.callbacks.attention_pictures import AttentionPictures
from ln_zoo.callbacks.curves_in_checkpoint import CurvesInCheckpoint
from ln_zoo.callbacks.data_dependent_init import DataDependentInit
from ln_zoo.callbacks.draw_samples import DRAWPictures, DRAWSamples
from ln_zoo.callbacks.epoch_evaluation import EpochEvaluation
from ln_zoo.callbacks.finite_loss import FiniteLoss, NonFiniteLossError
from ln_zoo.callbacks.handwriting_samples import HandwritingSamples
from ln_zoo.callbacks.last_checkpoint import LastCheckpoint
from ln_zoo.callbacks.normalize import Normalize
from ln_zoo.callbacks.picture_after_training import CurvesPlot
from ln_zoo.callbacks.population_statistics import PopulationStatistics
from ln_zoo.callbacks.predictions import PredictionWriter
from ln_zoo.callbacks.retrieval_pictures import RetrievalPictures
from ln_zoo.callbacks.sentence_evaluation import SentenceEvaluation
from ln_zoo.callbacks.step_evaluation import StepEvaluation
from ln_zoo.callbacks.vocabulary_expansion import VocabularyExpansion
from ln_zoo.callbacks.weight_geometry import WeightGeometry

__all__ = [
    "ActivityByPosition",
    "AttentionPictures",
    "CurvesInCheckpoint",
    "CurvesPlot",
    "DRAWPictures",
    "DRAWSamples",
    "DataDependentInit",
    "EpochEvaluation",
    "FiniteLoss",
    "HandwritingSamples",
    "LastCheckpoint",
    "NonFiniteLossError",
    "Normalize",
    "PopulationStatistics",
    "PredictionWriter",
    "RetrievalPictures",
    "SentenceEvaluation",
    "StepEvaluation",
    "VocabularyExpansion",
    "WeightGeometry",
]


def __getattr__(name: str) -> type:
    if name == "KeptCurves":
        warnings.warn(
            "KeptCurves is deprecated: use CurvesInCheckpoint", DeprecationWarning, stacklevel=2
        )
        return CurvesInCheckpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
