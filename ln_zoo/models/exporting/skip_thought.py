"""Export of the sentence encoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ln_zoo.export import Form, Part, Path, export_parts, text_path
from ln_zoo.models.skip_thought import SkipThought


@export_parts.register
def _parts(model: SkipThought) -> Mapping[str, Part]:
    return {"vectors": partial(_vectors, model)}


def _vectors(model: SkipThought, copy: Any, form: Form) -> Path:
    def vectors(model: Any, tokens: Tensor, lengths: Tensor) -> Tensor:
        _, h = model.encoder(model._inputs(model.embedding(tokens)), lengths=lengths)
        last: Tensor = h.transpose(0, 1).flatten(1)
        return last

    def step(model: Any, token: Tensor, h: Tensor, *number: Tensor) -> tuple[Tensor, ...]:
        _, after = model.encoder.step(model._inputs(model.embedding(token)), (h,), *number)
        return tuple(after)

    return text_path(
        model,
        copy,
        form,
        layer="encoder",
        words=model.embedding.num_embeddings,
        hidden=model.hidden_size,
        output="vectors",
        vectors=vectors,
        step=step,
        reference=type(model).forward,
        is_state=True,
    )
