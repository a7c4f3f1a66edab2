"""What ``ln-zoo analyze dynamics`` runs each model on."""

from ln_zoo.models.dynamics import handwriting, sequence
from ln_zoo.models.dynamics.task import DynamicsSource, DynamicsTask, dynamics_source

__all__ = ["DynamicsSource", "DynamicsTask", "dynamics_source", "handwriting", "sequence"]
