"""The rule of a norm (`Norm`) and its place in a layer (`Site`).

A layer describes each place as a `Site`; the norm defines the computation there. A norm of your own
is a frozen dataclass with two short methods:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class MyNorm(Norm):
    ...     eps: float = 1e-5
    ...     def init_params(self, site):
    ...         site.add_affine(gain=1.0)
    ...     def normalize(self, site, a, step=None):
    ...         return site.affine(a * torch.rsqrt(site.mean(a.square()) + self.eps))
    >>> from ln_zoo.layers import Linear
    >>> Linear(4, 3, norm=MyNorm())(torch.randn(2, 4)).shape
    torch.Size([2, 3])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ln_zoo.ops import Entries
from ln_zoo.ops.norm_records import Record, RowNorm

#: Columns of the paper's Table 1: maps that may leave a layer's output invariant.
INVARIANCES = (
    "weight_matrix_rescaling",
    "weight_matrix_recentering",
    "weight_vector_rescaling",
    "dataset_rescaling",
    "dataset_recentering",
    "example_rescaling",
)

#: ``observer(step, sizes, mean, var)`` receives statistics of consecutive time steps: the first
#: step (``None`` outside recurrent layers), the number of examples of each step, means and biased
#: variances, (steps, F), without gradient.
Observer = Callable[[int | None, Sequence[int], Tensor, Tensor], None]


class Norm:
    """Base class of norms, with operations on summed inputs and on weights.

    This class normalises nothing; each method may be overridden separately. Norms hold only plain
    values (parameters and running statistics are on the `Site`), so a norm can be shared by layers,
    compared, printed and stored as ``class_path`` and ``init_args``. Subclasses are frozen
    dataclasses. (`Norm` is not: jsonargparse does not accept subclasses of dataclasses by name.)
    """

    #: Statistics depend on the time step: recurrent layers pass ``step``.
    per_timestep: ClassVar[bool] = False
    #: In training, the output of an example depends on the rest of its batch.
    batch_dependent: ClassVar[bool] = False
    #: Sites have ``running_mean``, ``running_var`` and ``num_batches_tracked``, with a row for each
    #: time step in recurrent layers. In training, a `Site.observer` gets the batch statistics
    #: instead of these buffers.
    keeps_statistics: ClassVar[bool] = False
    #: Name of the parameter (F,) of `init_weight` that determines the length of each row of the
    #: effective weight, for `ln_zoo.layers.data_dependent_init`; ``None``: no such parameter.
    weight_scale: ClassVar[str | None] = None
    #: The maps of `INVARIANCES` that leave a layer's output unchanged (for eps = 0), checked by
    #: `ln_zoo.testing.NormCase`; ``None``: not declared.
    invariances: ClassVar[frozenset[str] | None] = None

    def init_params(self, site: Site) -> None:
        """Add gain, shift and running statistics to the site."""

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        r"""Normalise summed inputs; returns the same shape.

        Args:
            site: the site, with the parameters of `init_params`.
            a: summed inputs, float32 or float64: (N, \*, F) in feed-forward layers, (n, F) for the
                n examples active at one time step of a recurrent layer, (N, C, \*S) in
                convolutions.
            step: time step, counted from 0; ``None`` outside recurrent layers.
        """
        return a

    def on_sequence_start(self, site: Site, steps: int) -> None:
        """Hook that recurrent layers (not cells) call before a time loop of ``steps`` steps."""

    def init_weight(self, site: Site, weight: Tensor) -> None:
        """Add parameters of `weight` to the site, from an initialised weight (F, \\*)."""

    def weight(self, site: Site, weight: Tensor) -> Tensor:
        """The effective weight (F, \\*), computed once per forward pass."""
        return weight

    def to_spec(self, site: Site) -> Record:
        """`normalize` at this site as data for kernels; ``None`` if it cannot be expressed."""
        if type(self).normalize is Norm.normalize:
            return RowNorm(groups=site.groups)
        return None


def check_norm(norm: object) -> None:
    """TypeError unless it is a norm."""
    if not isinstance(norm, Norm):
        raise TypeError(
            "norm must be an instance of a subclass of ln_zoo.norms.Norm, such as "
            f"LayerNorm(); got {norm!r}"
        )


class Site(nn.Module):
    r"""A place in a layer where a norm acts; it owns the norm's parameters and buffers.

    Args:
        norm: the normalisation.
        role: role in the layer: ``"sum"``, ``"input"``, ``"recurrent"``, ``"cell"``.
        features: number F of features.
        groups: numbers of consecutive features that share statistics; default ``(F,)``. A GRU has
            ``(2H, H)``, for the gates and the candidate.
        axis: the axis of the features: -1, or 1 in convolutions.
        positions: the size (H, W) of a convolution's output, checked if given.
        recurrent: the site is in a recurrent layer, which passes ``step``.
        gate_size: number of features of each gate; ``None`` outside recurrent layers.
        blocks: number of blocks of each gate, if the recurrent weight is in blocks.
        own_shift: the layer adds no bias here, so an affine map needs a shift (an LSTM's cell).
        weight: the weight (F, \*) of the summed inputs, if the norm may act on it; read for initial
            values only.
        sums: the norm acts on summed inputs here. False at the input and recurrent sites of `RNN`,
            since eq. 4 normalises the sum of both terms.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        TypeError: if ``norm`` is not an instance of `Norm`.
        ValueError: if the groups do not sum to the features, or inputs have other positions.
    """

    gain: Tensor | None
    shift: Tensor | None
    #: Receives batch statistics instead of running averages; see `Norm.keeps_statistics`.
    observer: Observer | None = None
    blocks: int = 1  # also of sites that earlier versions pickled

    if TYPE_CHECKING:
        # Attributes that norms add are tensors.
        def __getattr__(self, name: str) -> Tensor: ...

    def __init__(
        self,
        norm: Norm,
        role: str,
        features: int,
        *,
        groups: tuple[int, ...] | None = None,
        axis: int = -1,
        positions: tuple[int, int] | None = None,
        recurrent: bool = False,
        gate_size: int | None = None,
        blocks: int = 1,
        own_shift: bool = False,
        weight: Tensor | None = None,
        sums: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_norm(norm)
        self.norm = norm
        self.role = role
        self.features = features
        self.groups = (features,) if groups is None else tuple(groups)
        if sum(self.groups) != features:
            raise ValueError(f"groups {self.groups} do not sum to the {features} features")
        self.axis = axis
        self.positions = None if positions is None else tuple(positions)
        self.recurrent = recurrent
        self.gate_size = gate_size
        self.blocks = blocks
        self.own_shift = own_shift
        self._sums = sums
        self.normalizes = sums and type(norm).normalize is not Norm.normalize
        self._factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_parameter("gain", None)
        self.register_parameter("shift", None)
        if sums:
            norm.init_params(self)
        if weight is not None:
            norm.init_weight(self, weight.detach())

    # Called by layers

    def forward(self, a: Tensor, step: int | None = None) -> Tensor:
        """Normalise summed inputs, in float32 at least; a no-op if the norm does nothing."""
        if not self.normalizes:
            return a
        if a.shape[self.axis] != self.features:
            raise RuntimeError(
                f"Expected summed inputs of {self.features} features at this {self.role} site, got "
                f"{a.shape[self.axis]}"
            )
        if self.positions is not None and a.shape[2:] != self.positions:
            raise ValueError(
                f"this layer has positions={self.positions}, got summed inputs at "
                f"{tuple(a.shape[2:])}: set positions={tuple(a.shape[2:])}"
            )
        # Statistics in half precision are too inexact.
        wide = a.float() if a.dtype in (torch.float16, torch.bfloat16) else a
        return self.norm.normalize(self, wide, step)

    def weight(self, weight: Tensor) -> Tensor:
        r"""The effective weight, (F, \*)."""
        return self.norm.weight(self, weight)

    def reset_weight(self, weight: Tensor) -> None:
        """Recompute norm parameters that depend on the weight."""
        self.norm.init_weight(self, weight.detach())

    def reset_parameters(self) -> None:
        """Reset gain, shift and running statistics, as needed after `to_empty`."""
        for tensor in (*self.parameters(), *self.buffers()):
            self._factory["device"] = tensor.device
        if self._sums:
            self.norm.init_params(self)

    def to_spec(self) -> Record:
        return self.norm.to_spec(self) if self.normalizes else RowNorm(self.groups)

    def entries(self) -> Entries | None:
        """Dict entries that `to_spec` and `weight` depend on, to invalidate cached plans.

        ``None`` if unknown: the norm acts on weights, uses time steps, has other tensors, or its
        record has another gain or shift than the site.
        """
        kind = type(self.norm)
        if (
            kind.weight is not Norm.weight
            or kind.on_sequence_start is not Norm.on_sequence_start
            or kind.per_timestep
            or self._buffers
            or set(self._parameters) != {"gain", "shift"}
        ):
            return None
        found = self.to_spec()
        affine = () if found is None or found.identity else (found.gain, found.shift)
        if any(a is not b for a, b in zip(affine, (self.gain, self.shift), strict=False)):
            return None
        attributes, parameters = self.__dict__, self._parameters
        own = [(attributes, name) for name in ("norm", "normalizes", "training")]
        return [*own, (parameters, "gain"), (parameters, "shift")]

    # Called by norms

    def add_affine(self, gain: float, by_unit: bool = False) -> None:
        """Add a gain (F,), and a shift (F,) of zeros if the layer has no bias here.

        ``by_unit``: gain and shift are (F, H, W), for all `positions`, with or without a bias.
        """
        shape = (self.features, *(self.positions or ())) if by_unit else (self.features,)
        self.add_parameter("gain", torch.full(shape, float(gain), **self._factory))
        if self.own_shift or by_unit:
            self.add_parameter("shift", torch.zeros(shape, **self._factory))

    def add_parameter(self, name: str, value: Tensor) -> None:
        """Add a parameter with this initial value, or reset it."""
        present = self._parameters.get(name)
        if present is None:
            self.register_parameter(name, nn.Parameter(value))
        else:
            with torch.no_grad():
                present.copy_(value)

    def add_buffer(self, name: str, shape: tuple[int, ...], fill: float, **factory: Any) -> None:
        """Add a buffer filled with one value, or refill it; never in half precision."""
        if name in self._buffers:
            self.get_buffer(name).fill_(fill)
            return
        factory = {"device": self._factory["device"], "dtype": self._factory["dtype"]} | factory
        if factory["dtype"] in (torch.float16, torch.bfloat16):
            factory["dtype"] = torch.float32
        self.register_buffer(name, torch.full(shape, fill, **factory))

    def affine(self, a: Tensor) -> Tensor:
        """``gain * a + shift``, if the site has them, in the dtype of ``a``."""
        if self.gain is not None:
            a = a * self.along(self.gain, a)
        if self.shift is not None:
            a = a + self.along(self.shift, a)
        return a

    def gain_and_shift(self, a: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gain = None if self.gain is None else self.gain.to(a.dtype)
        return gain, None if self.shift is None else self.shift.to(a.dtype)

    def groups_by(self, per_gate: bool = False, per_block: bool = False) -> tuple[int, ...]:
        """`groups`, or in recurrent layers each gate by itself, or each block of each gate."""
        if self.gate_size is None or not (per_gate or per_block):
            return self.groups
        size = self.gate_size // self.blocks if per_block else self.gate_size
        return (size,) * (self.features // size)

    def mean(self, a: Tensor, groups: tuple[int, ...] | None = None) -> Tensor:
        """Mean of each example and group of features; broadcasts against ``a``.

        ``groups``: default `groups`.
        """
        groups = self.groups if groups is None else groups
        if self.axis == 1:
            return a.mean(dim=tuple(range(1, a.dim())), keepdim=True)
        if len(groups) == 1:
            return a.mean(dim=-1, keepdim=True)
        parts = a.split(groups, dim=-1)
        return torch.cat([part.mean(-1, keepdim=True).expand_as(part) for part in parts], dim=-1)

    def example_dims(self, a: Tensor) -> tuple[int, ...]:
        """Axes that batch statistics average over: all but the features'."""
        axis = self.axis % a.dim()
        return tuple(d for d in range(a.dim()) if d != axis)

    def along(self, vector: Tensor, a: Tensor) -> Tensor:
        """A vector (F,), or tensor (F, H, W), shaped to broadcast against ``a``, in its dtype."""
        if vector.shape[:1] != (self.features,):
            raise RuntimeError(
                f"Expected gain or shift size ({self.features},) at this {self.role} site, got "
                f"{list(vector.shape)}"
            )
        vector = vector.to(a.dtype)
        if self.axis == -1 or vector.dim() > 1:
            return vector
        return vector.view(-1, *[1] * (a.dim() - 2))

    # nn.Module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Site:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, after in self._buffers.items():
            # module.half() must not convert running averages, which would stop changing.
            if after is not None and after.dtype in (torch.float16, torch.bfloat16):
                old = before[name]
                assert old is not None
                self._buffers[name] = old.to(after.device)
        return self

    def __prepare_scriptable__(self) -> Site:
        # torch.jit.script calls this for every submodule before compiling.
        raise RuntimeError(
            "torch.jit.script cannot compile the layers of ln_zoo: use torch.compile for speed, "
            "ln_zoo.export or torch.export.export to save them"
        )

    def extra_repr(self) -> str:
        return f"{self.role}, {self.features}, {self.norm}"
