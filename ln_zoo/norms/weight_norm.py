"""Weight normalisation (Salimans and Kingma 2016, arXiv 1602.07868)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ln_zoo.norms.base import Norm, Site


def _row_norms(weight: Tensor) -> Tensor:
    """Euclidean norm of each row of (F, \\*), as (F, 1, ...), in float32 at least."""
    wide = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    return torch.linalg.vector_norm(wide, dim=tuple(range(1, weight.dim())), keepdim=True)


@dataclass(frozen=True)
class WeightNorm(Norm):
    """Use each row w of a weight as ``scale * w / |w|`` (eq. 2 there); summed inputs are unchanged.

    The scale (F,) starts as the row's own norm, so that a fresh layer equals one without
    normalisation; `ln_zoo.layers.data_dependent_init` starts it from data instead (section 3
    there). After re-initialising weights, call the layer's ``reset_norm()``. A row of zeros stays
    zero. A recurrent layer builds the effective weights once per call.
    """

    weight_scale: ClassVar[str | None] = "scale"
    invariances: ClassVar[frozenset[str] | None] = frozenset(
        {"weight_matrix_rescaling", "weight_vector_rescaling"}
    )

    def init_weight(self, site: Site, weight: Tensor) -> None:
        site.add_parameter("scale", _row_norms(weight).flatten().to(weight.dtype))

    def weight(self, site: Site, weight: Tensor) -> Tensor:
        norms = _row_norms(weight)
        # A row of zeros has no direction: any finite factor leaves it zero, where 0 / 0 would not.
        factor = site.scale.view_as(norms) / norms.masked_fill(norms == 0, 1.0)
        return (weight * factor).to(weight.dtype)
