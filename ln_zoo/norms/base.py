"""The two halves of a norm: the rule (`Norm`) and the place it acts on (`Site`).

A layer describes each of its places as a `Site`; a norm says what happens there. A norm of
your own is a frozen dataclass with two short methods:

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

from ln_zoo.ops.plans import Entries
from ln_zoo.ops.records import Record, RowNorm

#: The columns of the paper's Table 1, in its order: what a layer's output may be invariant to.
INVARIANCES = (
    "weight_matrix_rescaling",
    "weight_matrix_recentering",
    "weight_vector_rescaling",
    "dataset_rescaling",
    "dataset_recentering",
    "example_rescaling",
)

#: ``observer(step, sizes, mean, var)`` receives the statistics of consecutive time steps: the
#: number of the first (``None`` outside recurrent layers), the number of examples of each, and
#: their means and biased variances, (steps, F), without gradient.
Observer = Callable[[int | None, Sequence[int], Tensor, Tensor], None]


class Norm:
    """A norm: what happens to summed inputs, and to weights.

    This class normalises nothing; each method may be overridden on its own. Norms hold plain
    values only (parameters and running statistics live on the `Site`), so that one norm can be
    shared by many layers, compared, printed and stored as ``class_path`` and ``init_args``. Make a
    subclass a frozen dataclass.

    `Norm` itself is not a dataclass: jsonargparse does not accept subclasses of one by name.
    """

    #: Statistics differ from one time step to the next: recurrent layers pass ``step``.
    per_timestep: ClassVar[bool] = False
    #: The output of one example depends on the rest of its batch, in training mode.
    batch_dependent: ClassVar[bool] = False
    #: Sites hold ``running_mean``, ``running_var`` and ``num_batches_tracked``, with a row for each
    #: time step in recurrent layers; in training mode, if a site has a `Site.observer`, the norm
    #: passes it the statistics of the batch and leaves these buffers alone.
    keeps_statistics: ClassVar[bool] = False
    #: Name of the parameter (F,) that `init_weight` puts on a site and that alone determines the
    #: length of each row of the effective weight, so that `ln_zoo.layers.data_dependent_init` can
    #: set it; ``None``: there is none.
    weight_scale: ClassVar[str | None] = None
    #: The maps of `INVARIANCES` that leave a layer's output unchanged (for eps = 0); ``None``: not
    #: stated, and not checked by `ln_zoo.testing.NormCase`.
    invariances: ClassVar[frozenset[str] | None] = None

    def init_params(self, site: Site) -> None:
        """Puts what `normalize` needs (gain, shift, running statistics) on the site."""

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        """Normalises summed inputs.

        Args:
            site: the place, with the parameters that `init_params` put there.
            a: summed inputs: (N, \\*, F) in feed-forward layers, (n, F) for the n examples active
                at one time step of a recurrent layer, (N, C, \\*S) in convolutions. Never half
                precision: the site has promoted it to float32.
            step: time step, counted from 0; ``None`` outside recurrent layers.

        Returns:
            The same shape.
        """
        return a

    def on_sequence_start(self, site: Site, steps: int) -> None:
        """Called by recurrent layers before their time loop, with its number T of steps.

        Cells do not call it, since their loop is the user's.
        """

    def init_weight(self, site: Site, weight: Tensor) -> None:
        """Takes what `weight` needs from a freshly initialised weight (F, \\*)."""

    def weight(self, site: Site, weight: Tensor) -> Tensor:
        """The weight to use, same shape (F, \\*); called once per forward, before any time loop."""
        return weight

    def to_spec(self, site: Site) -> Record:
        """What `normalize` does at this site, as data for kernels; ``None``: not known."""
        if type(self).normalize is Norm.normalize:
            return RowNorm(groups=site.groups)
        return None


class _NormKey(str):
    """A missing key of a state dict that says, in torch's error message, what to do.

    torch does not tell modules whether a load is strict. Its error message formats the missing
    keys; without an error, they are an ordinary list of strings.
    """

    hint: str

    def __format__(self, spec: str) -> str:
        return str(self) + self.hint


class Site(nn.Module):
    """A place in a layer where a norm acts; it owns the norm's parameters and buffers.

    Args:
        norm: the normalisation.
        role: what the place is called in its layer: ``"sum"``, ``"input"``, ``"recurrent"``,
            ``"cell"``.
        features: number F of features.
        groups: sizes of the runs of features that share statistics; default ``(F,)``. A GRU has
            ``(2H, H)``: both gates together, the candidate apart.
        axis: the axis of the features: -1, or 1 in convolutions.
        positions: the size (H, W) of the axes after the features of a convolution, if it is known;
            inputs of any other size are then refused.
        recurrent: whether the site lies inside a recurrent layer, where `Norm.normalize` gets
            ``step``.
        gate_size: number of features of each gate; ``None`` outside recurrent layers.
        own_shift: whether the layer adds no bias at this place, so that an affine map needs a shift
            of its own (an LSTM's cell).
        weight: the weight, (F, \\*), whose products are the summed inputs, if the norm may act on
            it; it is read for initial values, not kept.
        sums: whether the norm acts on summed inputs here. The input and recurrent sites of
            `RNN` are for weights only, since eq. 4 normalises the sum of both terms.
        device: of the parameters, as in torch.
        dtype: of the parameters, as in torch.

    Raises:
        TypeError: if ``norm`` is not an instance of `Norm`.
        ValueError: if the groups do not sum to the features, or inputs have other positions.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> site = Site(LayerNorm(), "sum", 6)
        >>> [name for name, _ in site.named_parameters()]
        ['gain']
        >>> site(torch.randn(2, 6)).shape
        torch.Size([2, 6])
    """

    gain: Tensor | None
    shift: Tensor | None
    #: Receives batch statistics, in place of running averages; see `Norm.keeps_statistics`.
    observer: Observer | None = None

    if TYPE_CHECKING:
        # What norms put on a site under names of their own are tensors.
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
        own_shift: bool = False,
        weight: Tensor | None = None,
        sums: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(norm, Norm):
            raise TypeError(
                "norm must be an instance of a subclass of ln_zoo.norms.Norm, such as "
                f"LayerNorm(); got {norm!r}"
            )
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

    # What layers call

    def forward(self, a: Tensor, step: int | None = None) -> Tensor:
        """Normalises summed inputs, in float32 at least; shape kept (see `Norm.normalize`).

        Where the norm does nothing, ``a`` itself is returned, in its own precision.
        """
        if not self.normalizes:
            return a
        if a.shape[self.axis] != self.features:
            raise RuntimeError(
                f"Expected summed inputs of {self.features} features at this {self.role} site, got "
                f"{a.shape[self.axis]}"
            )
        if self.positions is not None and a.shape[2:] != self.positions:
            raise ValueError(
                f"this layer was made for summed inputs at positions {self.positions}, got "
                f"{tuple(a.shape[2:])}: make it with positions={tuple(a.shape[2:])}"
            )
        # Means and variances of half-precision numbers lose too much: promoted once, here.
        wide = a.float() if a.dtype in (torch.float16, torch.bfloat16) else a
        return self.norm.normalize(self, wide, step)

    def weight(self, weight: Tensor) -> Tensor:
        """The weight to use in place of ``weight``, (F, \\*)."""
        return self.norm.weight(self, weight)

    def reset_weight(self, weight: Tensor) -> None:
        """Recomputes what the norm derives from the weights; call it after re-initialising them."""
        self.norm.init_weight(self, weight.detach())

    def reset_parameters(self) -> None:
        """Resets gain, shift and running statistics to their initial values, on their device.

        A module made on the meta device has none until then: `to_empty` leaves them undefined.
        """
        for tensor in (*self.parameters(), *self.buffers()):
            self._factory["device"] = tensor.device
        if self._sums:
            self.norm.init_params(self)

    def to_spec(self) -> Record:
        """What happens to summed inputs here, as data; ``None``: only the norm knows."""
        return self.norm.to_spec(self) if self.normalizes else RowNorm(self.groups)

    def entries(self) -> Entries | None:
        """The places that hold all that `to_spec` and `weight` depend on; ``None``: not known.

        A layer that finds the same objects there need not ask again. They are not known for a norm
        that acts on weights, reads time steps, has tensors of its own, or whose record has another
        gain or shift than the site's.
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
        ours, parameters = self.__dict__, self._parameters
        of_site = [(ours, name) for name in ("norm", "normalizes", "training")]
        return [*of_site, (parameters, "gain"), (parameters, "shift")]

    # What norms call

    def add_affine(self, gain: float, by_unit: bool = False) -> None:
        """Adds a gain (F,), and a shift (F,) of zeros where the layer has no bias of its own.

        Args:
            gain: initial value.
            by_unit: whether both are (F, H, W), with a number for each of the `positions`; then
                there is always a shift, since no layer has a bias of that shape.
        """
        shape = (self.features, *(self.positions or ())) if by_unit else (self.features,)
        self.add_parameter("gain", torch.full(shape, float(gain), **self._factory))
        if self.own_shift or by_unit:
            self.add_parameter("shift", torch.zeros(shape, **self._factory))

    def add_parameter(self, name: str, value: Tensor) -> None:
        """Adds a parameter with this initial value, or resets the existing one to it."""
        present = self._parameters.get(name)
        if present is None:
            self.register_parameter(name, nn.Parameter(value))
        else:
            with torch.no_grad():
                present.copy_(value)

    def add_buffer(self, name: str, shape: tuple[int, ...], fill: float, **factory: Any) -> None:
        """Adds a buffer filled with one value, or fills the existing one with it again.

        Floating-point buffers never become half precision.
        """
        if name in self._buffers:
            self.get_buffer(name).fill_(fill)
            return
        factory = {"device": self._factory["device"], "dtype": self._factory["dtype"]} | factory
        if factory["dtype"] in (torch.float16, torch.bfloat16):
            factory["dtype"] = torch.float32
        self.register_buffer(name, torch.full(shape, fill, **factory))

    def affine(self, a: Tensor) -> Tensor:
        """``gain * a + shift``, as far as the site has them; shape and precision of ``a``."""
        if self.gain is not None:
            a = a * self.along(self.gain, a)
        if self.shift is not None:
            a = a + self.along(self.shift, a)
        return a

    def gain_and_shift(self, a: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Both in the precision of a, for functions of torch that apply them themselves."""
        gain = None if self.gain is None else self.gain.to(a.dtype)
        return gain, None if self.shift is None else self.shift.to(a.dtype)

    def mean(self, a: Tensor) -> Tensor:
        """Each example's mean over what shares statistics, in a shape that broadcasts against a."""
        if self.axis == 1:
            return a.mean(dim=tuple(range(1, a.dim())), keepdim=True)
        if len(self.groups) == 1:
            return a.mean(dim=-1, keepdim=True)
        parts = a.split(self.groups, dim=-1)
        return torch.cat([part.mean(-1, keepdim=True).expand_as(part) for part in parts], dim=-1)

    def example_dims(self, a: Tensor) -> tuple[int, ...]:
        """The axes that batch statistics average over: all but that of the features."""
        axis = self.axis % a.dim()
        return tuple(d for d in range(a.dim()) if d != axis)

    def along(self, vector: Tensor, a: Tensor) -> Tensor:
        """A vector (F,) in the precision of a, shaped to broadcast along a's feature axis.

        A tensor with a number for each position, (F, H, W), already does so.
        """
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        missing: list[str] = rest[2]
        own = [n for n, a in self._parameters.items() if a is not None and prefix + n in missing]
        # Keys of the layer come before those of its sites: its weights are there, a norm's are not.
        of_layer = prefix.rpartition("site")[0] + "weight"
        if own and not any(k.startswith(of_layer) or isinstance(k, _NormKey) for k in missing):
            key = _NormKey(prefix + own[0])
            key.hint = (
                f"; a plain layer has no {' and '.join(own)} of {type(self.norm).__name__}: load "
                "its weights with strict=False (with WeightNorm, then call the layer's "
                "reset_norm()), or convert the plain model with "
                "ln_zoo.normalize_(model, norm, calibrate=batch)"
            )
            missing[missing.index(prefix + own[0])] = key

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Site:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, after in self._buffers.items():
            # Running averages in half precision stop moving: module.half() leaves them alone.
            if after is not None and after.dtype in (torch.float16, torch.bfloat16):
                old = before[name]
                assert old is not None
                self._buffers[name] = old.to(after.device)
        return self

    def __prepare_scriptable__(self) -> Site:
        # torch.jit.script asks every submodule for this before it compiles the first.
        raise RuntimeError(
            "torch.jit.script cannot compile the layers of ln_zoo, whose loops depend on their "
            "norm: use torch.compile for speed, and ln_zoo.export or torch.export.export to save "
            "them (torch.jit.trace keeps one sequence length)"
        )

    def extra_repr(self) -> str:
        return f"{self.role}, {self.features}, {self.norm}"
