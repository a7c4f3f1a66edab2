"""Export of the convolutional classifier."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ln_zoo.export import Form, Part, Path, export_parts, map_path, paths
from ln_zoo.models.conv import ConvClassifier


@export_parts.register
def _parts(model: ConvClassifier) -> Mapping[str, Part]:
    return {"logits": partial(_logits, model)}


def _logits(model: ConvClassifier, copy: Any, form: Form) -> Path:
    images = {"images": paths.uniform("N", *model.image_shape)}
    # A file has no memory formats.
    return map_path(
        model, copy, form, images, "logits", type(model).forward, lambda c, x: c.network(x)
    )
