"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ln_zoo.norms.arguments import check_fields
from ln_zoo.norms.base import Norm, Site
from ln_zoo.ops.norm_records import Record, RowNorm


@dataclass(frozen=True)
class RMSNorm(Norm):
    """Layer normalisation without centring: each example is divided by its root mean square.

    Args:
        gain: initial value of the gain, (F,); default 1.
        eps: added to the mean square, inside the root; default 1e-5.
        per_block: separate statistics for each block of each gate of a recurrent layer with
            ``blocks``.

    Raises:
        ValueError: if gain or eps is not finite, or eps is negative.
    """

    gain: float = 1.0
    eps: float = 1e-5
    per_block: bool = False

    invariances: ClassVar[frozenset[str] | None] = frozenset(
        {"weight_matrix_rescaling", "dataset_rescaling", "example_rescaling"}
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def init_params(self, site: Site) -> None:
        site.add_affine(self.gain)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        squares = site.mean(a.square(), site.groups_by(per_block=self.per_block))
        return site.affine(a * torch.rsqrt(squares + self.eps))

    def to_spec(self, site: Site) -> Record:
        if type(self).normalize is not RMSNorm.normalize:
            return super().to_spec(site)
        groups = site.groups_by(per_block=self.per_block)
        return RowNorm(groups, True, False, self.eps, site.gain, site.shift)
