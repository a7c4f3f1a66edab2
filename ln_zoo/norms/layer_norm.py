"""Layer normalisation (Ba, Kiros, Hinton 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.norms.arguments import check_fields
from ln_zoo.norms.base import Norm, Site
from ln_zoo.ops.norm_records import Record, RowNorm

Convolution = Literal["channel", "unit", "position"]


@dataclass(frozen=True)
class LayerNorm(Norm):
    """Mean and variance over the summed inputs of one example (eq. 3), then a gain per feature.

    The layer's own bias is added after normalisation: it is the paper's b.

    Args:
        gain: initial value of the gain g (eq. 4), (F,); default 1.
        eps: added to the biased variance, inside the root; default 1e-5. The paper has none; a row
            of equal values (such as the recurrent term of a zero state) needs one.
        convolution: statistics and gains in convolutions (N, C, H, W), which the paper (section
            6.7) does not specify; no effect elsewhere.

            - ``"channel"``: statistics over C, H and W of one example, one gain per channel (C,):
              group normalisation with one group.
            - ``"unit"``: the same statistics, and a gain and a shift for each position of a channel
              (C, H, W), the literal reading of "unit". The layer needs ``positions``.
            - ``"position"``: statistics over the channels at each position, one gain per channel.
        per_gate: separate statistics for each gate of a recurrent layer, as in some published code.
            By default all gates of an LSTM share them (eq. 20-22), as do a GRU's two (eq. 26).
        per_block: separate statistics for each block of each gate of a recurrent layer with
            ``blocks``.

    Raises:
        ValueError: if gain or eps is not finite, or eps is negative; for another ``convolution``;
            with ``"unit"``, for a convolution without positions.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> layer = Linear(5, 4, bias=False, norm=LayerNorm(eps=0.0))
        >>> a = layer(torch.randn(3, 5))
        >>> bool(a.mean(-1).abs().max() < 1e-6)
        True
    """

    gain: float = 1.0
    eps: float = 1e-5
    convolution: Convolution = "channel"
    per_gate: bool = False
    per_block: bool = False

    invariances: ClassVar[frozenset[str] | None] = frozenset(
        {
            "weight_matrix_rescaling",
            "weight_matrix_recentering",
            "dataset_rescaling",
            "example_rescaling",
        }
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.convolution not in get_args(Convolution):
            raise ValueError(
                f"LayerNorm: convolution must be one of {', '.join(get_args(Convolution))}, got "
                f"{self.convolution!r}"
            )

    def init_params(self, site: Site) -> None:
        by_unit = site.axis == 1 and self.convolution == "unit"
        if by_unit and site.positions is None:
            raise ValueError(
                'LayerNorm(convolution="unit") has a gain for each position: set positions=(H, W), '
                "the size of the layer's output"
            )
        site.add_affine(self.gain, by_unit=by_unit)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        if site.axis == 1:
            return self._convolution_sums(site, a)
        groups = site.groups_by(self.per_gate, self.per_block)
        if len(groups) == 1:
            return site.affine(F.layer_norm(a, groups, eps=self.eps))
        parts = a.split(groups, dim=-1)
        rows = [F.layer_norm(part, part.shape[-1:], eps=self.eps) for part in parts]
        return site.affine(torch.cat(rows, dim=-1))

    def _convolution_sums(self, site: Site, a: Tensor) -> Tensor:
        # Fused with gains, which saves a pass over the positions.
        gain, shift = site.gain_and_shift(a)
        if self.convolution == "channel":
            # F.group_norm refuses examples of one sum.
            return torch.group_norm(a, 1, gain, shift, self.eps)
        if self.convolution == "unit":
            return F.layer_norm(a, a.shape[1:], gain, shift, self.eps)
        rows = a.movedim(1, -1)
        return F.layer_norm(rows, rows.shape[-1:], gain, shift, self.eps).movedim(-1, 1)

    def to_spec(self, site: Site) -> Record:
        if type(self).normalize is not LayerNorm.normalize:
            return super().to_spec(site)
        groups = site.groups_by(self.per_gate, self.per_block)
        return RowNorm(groups, True, True, self.eps, site.gain, site.shift)
