"""Callbacks: whole-set curves, finite losses, pictures and prediction files."""

from ln_zoo.callbacks.curves import CurvesPlot
from ln_zoo.callbacks.epoch_evaluation import EpochEvaluation
from ln_zoo.callbacks.finite_loss import FiniteLoss, NonFiniteLossError
from ln_zoo.callbacks.last_checkpoint import LastCheckpoint
from ln_zoo.callbacks.predictions import PredictionWriter

__all__ = [
    "CurvesPlot",
    "EpochEvaluation",
    "FiniteLoss",
    "LastCheckpoint",
    "NonFiniteLossError",
    "PredictionWriter",
]
