"""Exported parts of each model, registered with `ln_zoo.export.export_parts`."""

from ln_zoo.models.exporting import (  # noqa: F401
    attentive_reader,
    conv,
    draw,
    handwriting,
    mlp,
    order_embedding,
    sequence,
    skip_thought,
)
