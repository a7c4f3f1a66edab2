"""Exported parts of each model, registered with `ln_zoo.export.export_parts`."""

from ln_zoo.models.exporting import (
    attentive_reader,
    conv,
    draw,
    handwriting,
    mlp,
    order_embedding,
    sequence,
    skip_thought,
)

__all__ = [
    "attentive_reader",
    "conv",
    "draw",
    "handwriting",
    "mlp",
    "order_embedding",
    "sequence",
    "skip_thought",
]
