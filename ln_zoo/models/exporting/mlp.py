"""Export of the fully connected classifier."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ln_zoo.export import Form, Part, Path, export_parts, map_path, paths
from ln_zoo.models.mlp import MLPClassifier


@export_parts.register
def _parts(model: MLPClassifier) -> Mapping[str, Part]:
    return {"logits": partial(_logits, model)}


def _logits(model: MLPClassifier, copy: Any, form: Form) -> Path:
    images = {"images": paths.uniform("N", model.in_features)}
    return map_path(model, copy, form, images, "logits", type(model).forward)
