"""Export of the encoders of captions and images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ln_zoo.export import Form, Part, Path, export_parts, map_path, paths, text_path
from ln_zoo.models.order_embedding import OrderEmbedding


@export_parts.register
def _parts(model: OrderEmbedding) -> Mapping[str, Part]:
    return {"captions": partial(_captions, model), "images": partial(_images, model)}


def _captions(model: OrderEmbedding, copy: Any, form: Form) -> Path:
    def vectors(model: Any, tokens: Tensor, lengths: Tensor) -> Tensor:
        _, h = model.recurrent(model._inputs(tokens), lengths=lengths)
        return _unit_vectors(model, h[0])

    def step(model: Any, token: Tensor, h: Tensor, *number: Tensor) -> tuple[Tensor, ...]:
        _, (last,) = model.recurrent.step(model._inputs(token), (h,), *number)
        return _unit_vectors(model, last[0]), last

    return text_path(
        model,
        copy,
        form,
        layer="recurrent",
        words=model.words.num_embeddings,
        hidden=model.hidden_size,
        output="embeddings",
        vectors=vectors,
        step=step,
        reference=type(model).embed_captions,
    )


def _images(model: OrderEmbedding, copy: Any, form: Form) -> Path:
    def run(model: Any, features: Tensor) -> Tensor:
        return _unit_vectors(model, model.image_map(features))

    inputs = {"features": paths.uniform("N", model.image_features)}
    return map_path(model, copy, form, inputs, "embeddings", type(model).embed_images, run)


def _unit_vectors(model: Any, points: Tensor) -> Tensor:
    """Unit vectors, as `OrderEmbedding` computes them in float32 without autocast."""
    unit = F.normalize(points, dim=-1)
    return unit.abs() if model.absolute else unit
