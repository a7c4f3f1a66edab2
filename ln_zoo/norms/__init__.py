"""Normalisation of summed inputs or weights of a layer."""

import torch

from ln_zoo.norms.base import INVARIANCES, Norm, Site
from ln_zoo.norms.batch_norm import BatchNorm
from ln_zoo.norms.config import from_config, to_config
from ln_zoo.norms.identity import Identity
from ln_zoo.norms.layer_norm import LayerNorm
from ln_zoo.norms.rms_norm import RMSNorm
from ln_zoo.norms.statistics import (
    batch_dependent,
    batch_statistics,
    keeps_statistics,
    population_statistics,
)
from ln_zoo.norms.weight_norm import WeightNorm

# Allows torch.load(weights_only=True) of checkpoints with norms among their hyperparameters.
torch.serialization.add_safe_globals([BatchNorm, Identity, LayerNorm, RMSNorm, WeightNorm])

__all__ = [
    "INVARIANCES",
    "BatchNorm",
    "Identity",
    "LayerNorm",
    "Norm",
    "RMSNorm",
    "Site",
    "WeightNorm",
    "batch_dependent",
    "batch_statistics",
    "from_config",
    "keeps_statistics",
    "population_statistics",
    "to_config",
]
