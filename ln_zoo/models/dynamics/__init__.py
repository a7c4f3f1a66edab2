"""Data and loss for ``ln-zoo analyze trained_dynamics``, by model."""

from ln_zoo.models.dynamics import handwriting, sequence
from ln_zoo.models.dynamics.task import DynamicsSource, DynamicsTask, dynamics_source

__all__ = ["DynamicsSource", "DynamicsTask", "dynamics_source", "handwriting", "sequence"]
