"""Export of the attentive reader."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ln_zoo.export import Form, Part, Parts, Path, export_parts, paths
from ln_zoo.export.paths import Tensors, no_step_form
from ln_zoo.models.attentive_reader import AttentiveReader, Inputs


@export_parts.register
def _parts(model: AttentiveReader) -> Mapping[str, Part]:
    return {"answers": partial(_answers, model)}


def _answers(model: AttentiveReader, copy: Any, form: Form) -> Path:
    if form == "step":
        raise no_step_form(model, "it attends to all of a passage at once")
    # Statistics of single batches, for which padding is left out, do not matter in evaluation.
    copy._skips_padding = False
    words = model.embedding.num_embeddings

    def run(model: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        features, attention = model._read(Inputs(*inputs))
        return model.output(features), attention

    def by_model(model: Any, given: Tensors) -> dict[str, Tensor]:
        inputs = Inputs(*given.values())
        return {"logits": model(inputs), "attention": model.attention(inputs)}

    inputs = {
        "passage": paths.numbers(words, "N", "T"),
        "passage_lengths": paths.lengths(),
        "query": paths.numbers(words, "N", "S"),
        "query_lengths": paths.lengths("S"),
    }
    return Path(Parts(copy, run), by_model, inputs, ("logits", "attention"))
