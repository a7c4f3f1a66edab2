"""Layer normalisation (Ba, Kiros, Hinton 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.norms.base import Norm, Site
from ln_zoo.norms.checks import check_eps
from ln_zoo.ops.records import Record, RowNorm


@dataclass(frozen=True)
class LayerNorm(Norm):
    """Mean and variance over the summed inputs of one case (eq. 3), then a gain per feature.

    The layer's own bias is added after normalisation: it is the paper's b. In convolutions the
    statistics run over channels and positions, with one gain per channel.

    Args:
        gain: initial value of the gain g (eq. 4), (F,).
        eps: added to the biased variance, inside the root. The paper has none; a constant row
            (such as the recurrent term of a zero state) needs one.

    Raises:
        ValueError: if eps is negative or not finite.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> layer = Linear(5, 4, bias=False, norm=LayerNorm(eps=0.0))
        >>> a = layer(torch.randn(3, 5))
        >>> bool(a.mean(-1).abs().max() < 1e-6)
        True
    """

    gain: float = 1.0
    eps: float = 1e-5

    invariances: ClassVar[frozenset[str] | None] = frozenset(
        {
            "weight_matrix_rescaling",
            "weight_matrix_recentering",
            "dataset_rescaling",
            "case_rescaling",
        }
    )

    def __post_init__(self) -> None:
        check_eps(self)

    def init_sums(self, site: Site) -> None:
        site.add_affine(self.gain)

    def sums(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        if site.axis == 1:
            return site.affine(F.group_norm(a, 1, eps=self.eps))
        if len(site.groups) == 1:
            return site.affine(F.layer_norm(a, site.groups, eps=self.eps))
        parts = a.split(site.groups, dim=-1)
        rows = [F.layer_norm(part, part.shape[-1:], eps=self.eps) for part in parts]
        return site.affine(torch.cat(rows, dim=-1))

    def describe(self, site: Site) -> Record:
        if type(self).sums is not LayerNorm.sums:
            return super().describe(site)
        return RowNorm(site.groups, True, True, self.eps, site.gain, site.shift)
