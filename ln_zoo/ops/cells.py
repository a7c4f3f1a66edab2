"""Recurrent cells: a pure step function plus metadata.

Loops over time, layers and directions are the same for all cells (`ln_zoo.ops.recurrence`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from ln_zoo.ops.regularization import Noise

#: The states of one or more examples: (h,), or (h, c) in an LSTM.
States = tuple[Tensor, ...]
#: Normalisation of the summed inputs at each place of a cell, by role: ``site(a, step)``.
Sites = Mapping[str, Callable[[Tensor, int | None], Tensor]]


class Weights(NamedTuple):
    """Effective weights of one direction of one layer, in torch's order.

    G is the number of pre-activations: 4H, 3H or H. Those of ``hh`` and ``bias_hh`` are
    `Cell.recurrent_gates` * H.
    """

    ih: Tensor  # input to hidden, (G, I)
    # Hidden to hidden, (G, H), or (G, P) with a projection to P features. In B blocks, those of a
    # call have the parameter's form, (B, G / B, H / B); those of a step are (G, H / B), the rows of
    # a block-diagonal weight without their zeros. Multiply with `linear`.
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    hr: Tensor | None = None
    own: tuple[Tensor, ...] = ()
    noise: Noise = Noise()

    @property
    def bias(self) -> Tensor | float:
        if self.bias_ih is None or self.bias_hh is None:
            return 0.0
        return self.bias_ih + self.bias_hh

    @property
    def of_step(self) -> Weights:
        """The weights as a step gets them."""
        return self if self.hh.dim() == 2 else self._replace(hh=rows_of_blocks(self.hh))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self[:5], *self.own)

    def dropped(self, h: Tensor) -> Tensor:
        mask = self.noise.dropout
        return h if mask is None else h * mask[: len(h)]


Step = Callable[[Tensor, States, Weights, Sites, int | None], States]


@dataclass(frozen=True)
class Place:
    """A place in a cell where a norm may act.

    Args:
        role: ``"input"``, ``"recurrent"``, or another name that the step uses.
        groups: runs of features that share statistics, in units of H.
        features: number of features, in place of groups, if it does not depend on H.
        weight: the weight that a norm may act on, ``"ih"`` or ``"hh"``.
        sums: whether summed inputs are normalised, or the weight alone.
        own_shift: whether the norm's shift replaces the layer's bias.
        products: weights whose products are summed here. Default: ``weight`` if ``sums``.
    """

    role: str
    groups: tuple[int, ...]
    weight: str | None = None
    sums: bool = True
    own_shift: bool = False
    products: tuple[str, ...] = ()
    features: int = 0

    def sizes(self, hidden: int) -> tuple[int, ...]:
        """Numbers of features that share statistics, for H = ``hidden``."""
        return (self.features,) if self.features else tuple(n * hidden for n in self.groups)

    def __post_init__(self) -> None:
        if self.weight is not None and self.sums and not self.products:
            object.__setattr__(self, "products", (self.weight,))


@dataclass(frozen=True)
class Arithmetic:
    """The equations of a step that engines have loops of."""

    gates: int  # G / H
    cell_state: bool = False  # whether it has a cell state c beside h
    # Whether a reset gate multiplies the recurrent term of the candidate, the last of the gates.
    reset_gate: bool = False
    relu: bool = False  # whether the candidate is ReLU, not tanh
    # Whether there are loops of joint forms, and for norms over examples.
    joint: bool = False
    over_examples: bool = True


#: By name. The order is that of their numbers in the schema of the operator.
ARITHMETICS = {
    "LSTM": Arithmetic(4, cell_state=True, joint=True),
    "GRU": Arithmetic(3, reset_gate=True, joint=True),
    "RNN_TANH": Arithmetic(1),
    "RNN_RELU": Arithmetic(1, relu=True),
    "light GRU": Arithmetic(2, relu=True, over_examples=False),
}


class Terms(NamedTuple):
    """Weights of both products, and gain and bias of the recurrent term, or of a joint sum."""

    w_ih: Tensor
    w_hh: Tensor
    gain: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class Form:
    """Arithmetic and places of a cell, as kernels define them."""

    arithmetic: str  # key of `ARITHMETICS`
    # Roles of the places at the input term, the recurrent term (in joint cells: the sum) and the
    # output; None if there is no such place.
    roles: tuple[str | None, str | None, str | None]
    # Whether both terms are added before normalisation. The reset gate of a joint GRU multiplies
    # the whole candidate.
    joint: bool = False
    carried: bool = False  # whether an LSTM carries on the normalised cell state
    # If given, a joint GRU computes h' = u n + (1 - u) h with u = sigmoid(a + update_offset).
    update_offset: float | None = None

    def lowered(self, terms: Terms) -> Terms:
        """The terms with which ``arithmetic`` computes this cell; differentiable."""
        if self.update_offset is None:
            return terms
        # The gate of the old state is 1 - u = sigmoid(-a - update_offset).
        w_ih, w_hh, gain, bias = terms
        hidden, one = w_hh.shape[1], w_hh.new_ones(1)
        sign = torch.cat([one, -one, one]).repeat_interleave(hidden)
        if gain is None:
            w_ih, w_hh = w_ih * sign.unsqueeze(1), w_hh * sign.unsqueeze(1)
        else:
            gain = gain * sign
        offset = self.update_offset * (sign - 1) / 2
        return Terms(w_ih, w_hh, gain, offset if bias is None else bias * sign + offset)


@dataclass(frozen=True)
class Cell:
    """A recurrent cell.

    Requires the places ``"input"`` (weight ``"ih"``) and ``"recurrent"`` (weight ``"hh"``). They
    mostly have the same number of gates; a step that multiplies with ``weights.hh`` several times
    may have more in ``"recurrent"``. Every state is (N, H); the first, projected or not, is the
    output.

    Args:
        name: name in messages and the log.
        step: ``step(wx, states, weights, sites, t)`` returns the next states. ``wx`` (n, G) is the
            input term, normalised at the ``"input"`` place; ``t`` is the time step. States are
            float32 or wider; multiply with `linear`. Define it at the top level of a module, so
            that layers can be pickled.
        places: where norms act.
        states: names of the states; the first is the output.
        weights: name and number of rows of each further weight, or its shape, where 0 is H.
            ``("peephole", 3)`` is the parameter ``weight_peephole_l0`` (3, H) and the first of
            ``weights.own``. Multiply a state with it by `linear`.
        candidates: indices of the blocks of H rows that are candidate states, not gates.
        forget: indices of the blocks that are forget gates; their bias starts positive.
        projects: whether the step applies ``weights.hr`` if present.
        drops: whether the step uses ``weights.dropped(h)``, which supports recurrent dropout.
        unclipped: the same cell without clipped derivatives, if this one clips.
        form: the computation of kernels; used for `CELLS` only.

    Raises:
        ValueError: for missing places or states, or block indices out of range.
    """

    name: str
    step: Step
    places: tuple[Place, ...]
    states: tuple[str, ...] = ("h",)
    weights: tuple[tuple[str, int | tuple[int, int]], ...] = ()
    candidates: tuple[int, ...] = ()
    forget: tuple[int, ...] = ()
    projects: bool = False
    drops: bool = False
    unclipped: Cell | None = None
    form: Form | None = None

    def __post_init__(self) -> None:
        of_weights = {place.role: place.weight for place in self.places}
        if (of_weights.get("input"), of_weights.get("recurrent")) != ("ih", "hh"):
            raise ValueError(
                f"cell {self.name!r} needs places 'input' with weight='ih' and 'recurrent' with "
                f"weight='hh'; got {self.places}"
            )
        if not self.states:
            raise ValueError(f"cell {self.name!r} needs at least one state, its output")
        for name, blocks in (("candidates", self.candidates), ("forget", self.forget)):
            if not set(blocks) <= set(range(self.gates)):
                raise ValueError(
                    f"cell {self.name!r}: {name} must be numbers of blocks of rows, 0 to "
                    f"{self.gates - 1}; got {blocks}"
                )

    @functools.cached_property
    def gates(self) -> int:
        """Gates of the input weight."""
        return sum(next(place.groups for place in self.places if place.role == "input"))

    @functools.cached_property
    def recurrent_gates(self) -> int:
        """Gates of the recurrent weight and its bias."""
        return sum(next(place.groups for place in self.places if place.role == "recurrent"))

    def own_shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Shapes of `weights` by name, for H = ``hidden``."""
        pairs = ((n, (s, hidden) if isinstance(s, int) else s) for n, s in self.weights)
        return {name: (rows or hidden, columns or hidden) for name, (rows, columns) in pairs}

    def blocks(self, weights: Weights) -> int:
        """Blocks of a direction's recurrent weight."""
        *_, rows, depth = weights.hh.shape
        if weights.hh.dim() == 3:
            return len(weights.hh)
        return 1 if weights.hr is not None else rows // (self.recurrent_gates * depth)

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(place.role for place in self.places)

    @property
    def has_kernels(self) -> bool:
        return CELLS.get(self.name) is self

    @property
    def in_torch(self) -> bool:
        """Whether torch has this cell, under the same name as ``mode`` of `torch.nn.RNNBase`."""
        return self.has_kernels and self.name in ("LSTM", "GRU", "RNN_TANH", "RNN_RELU")

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and unpickled cells of `CELLS` are the same object.
        if self.has_kernels:
            return _cell_called, (self.name,)
        return Cell, tuple(getattr(self, field.name) for field in fields(self))


def _cell_called(name: str) -> Cell:
    return CELLS[name]


def linear(a: Tensor, weight: Tensor) -> Tensor:
    """Product (n, F) of states a (n, H) and a weight (F, H), in the weight's dtype.

    A recurrent weight in B blocks is (F, H / B), F a multiple of H: unit i of each run of H rows
    reads only block ``i // (H / B)`` of a.
    """
    a = a.to(weight.dtype)
    width, depth = a.shape[-1], weight.shape[-1]
    if width == depth or width % depth or len(weight) % width:
        return F.linear(a, weight)
    return block_linear(a, weight)


def input_products(x: Tensor, weight: Tensor) -> Tensor:
    r"""Inputs x (\*, I) times their weight (G, I); or x (\*, G) itself, for a weight (G, 0)."""
    return F.linear(x, weight) if weight.shape[1] or not x.shape[-1] else x


def block_linear(a: Tensor, weight: Tensor) -> Tensor:
    """Product (n, F) of states a (n, H) and the rows (F, H / B) of a block-diagonal weight."""
    # Kernels are generated around products.
    if has_torch_function((a, weight)):
        found: Tensor = handle_torch_function(block_linear, (a, weight), a, weight)
        return found
    depth = weight.shape[1]
    blocks = a.shape[1] // depth
    left = a.reshape(-1, blocks, depth).transpose(0, 1)
    products = left @ weight.reshape(-1, blocks, depth, depth).mT  # (F / H, B, n, H / B)
    return products.permute(2, 0, 1, 3).reshape(len(a), len(weight))


def rows_of_blocks(weight: Tensor) -> Tensor:
    """Rows (G, H / B) in the order of features, of a weight in blocks (B, G / B, H / B)."""
    blocks, _, depth = weight.shape
    return weight.reshape(blocks, -1, depth, depth).transpose(0, 1).reshape(-1, depth)


def recurrent_shape(rows: int, columns: int, blocks: int) -> tuple[int, ...]:
    """Shape of a recurrent weight: (rows, columns), or (B, rows / B, columns / B) in blocks."""
    return (rows, columns) if blocks == 1 else (blocks, rows // blocks, columns // blocks)


def blocks_of_rows(rows: Tensor, blocks: int) -> Tensor:
    """The inverse of `rows_of_blocks`."""
    depth = rows.shape[1]
    return rows.reshape(-1, blocks, depth, depth).transpose(0, 1).reshape(blocks, -1, depth)


def full_weight(rows: Tensor, blocks: int) -> Tensor:
    """The block-diagonal weight (G, H) with these rows (G, H / B)."""
    depth = rows.shape[1]
    parts = rows.reshape(-1, blocks, depth, depth).permute(0, 2, 3, 1)
    return parts.diag_embed().permute(0, 3, 1, 4, 2).reshape(len(rows), blocks * depth)


Clip = Callable[[Tensor], Tensor]


def _unclipped(a: Tensor) -> Tensor:
    return a


def _lstm_sums(
    wx: Tensor, h: Tensor, w: Weights, sites: Sites, t: int | None, joint: bool = False
) -> Tensor:
    uh = linear(w.dropped(h), w.hh)
    return (sites["sum"](wx + uh, t) if joint else wx + sites["recurrent"](uh, t)) + w.bias


def _lstm_output(
    o: Tensor, c: Tensor, w: Weights, sites: Sites, t: int | None, carried: bool = False
) -> States:
    shown = sites["cell"](c, t)
    h = o.sigmoid() * shown.tanh()
    return h if w.hr is None else linear(h, w.hr), shown if carried else c


def lstm_step(
    wx: Tensor,
    states: States,
    w: Weights,
    sites: Sites,
    t: int | None,
    clip: Clip = _unclipped,
    joint: bool = False,
    carried: bool = False,
) -> States:
    """LSTM (paper, eq. 20-22; DRAW: eq. 29-31), gates i, f, g, o; ``clip`` acts on pre-activations.

    Each term has its own norm, and the cell state is normalised only on its way to the output.
    `Form.joint` and `Form.carried` describe other libraries' variants.
    """
    h, c = states
    i, f, g, o = clip(_lstm_sums(wx, h, w, sites, t, joint)).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return _lstm_output(o, c, w, sites, t, carried)


def peephole_lstm_step(
    wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None, clip: Clip = _unclipped
) -> States:
    """LSTM with peepholes (Graves 2013, eq. 7-10), one weight per unit and gate.

    Gates i and f see the previous cell state, o the new one; neither is normalised.
    """
    h, c = states
    i, f, g, o = _lstm_sums(wx, h, w, sites, t).chunk(4, dim=-1)
    to_i, to_f, to_o = w.own[0]
    i, f, g = clip(i + to_i * c), clip(f + to_f * c), clip(g)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return _lstm_output(clip(o + to_o * c), c, w, sites, t)


class _ClipDerivative(torch.autograd.Function):
    # Separate setup_context: required by torch.func.
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, bound: float) -> Tensor:
        return a.view_as(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.bound = inputs[1]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d.clamp(-ctx.bound, ctx.bound), None


def clip_derivative(a: Tensor, bound: float) -> Tensor:
    """Identity whose gradient is clipped elementwise to +-bound."""
    found: Tensor = _ClipDerivative.apply(a, bound)
    return found


def gru_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """GRU (paper, eq. 26-28), gates r, z, n; the reset gate acts after the product, as in torch.

    With a bias in ``weights.own``, the input term is normalised at the place ``"term"``.
    """
    (h,) = states
    if w.own:
        wx = sites["term"](wx + w.own[0].flatten(), t)
    uh = sites["recurrent"](linear(w.dropped(h), w.hh), t)
    if w.bias_ih is not None and w.bias_hh is not None:
        wx, uh = wx + w.bias_ih, uh + w.bias_hh
    (xr, xz, xn), (hr, hz, hn) = wx.chunk(3, dim=-1), uh.chunk(3, dim=-1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return ((1 - z) * n + z * h,)


def joint_gru_step(
    wx: Tensor,
    states: States,
    w: Weights,
    sites: Sites,
    t: int | None,
    update_offset: float | None = None,
) -> States:
    """GRU that normalises the sum of both terms. See `Form` for ``update_offset``.

    A bias in ``weights.own`` is added before the norm.
    """
    (h,) = states
    a = wx + linear(w.dropped(h), w.hh)
    if w.own:
        a = a + w.own[0].flatten()
    r, z, n = (sites["sum"](a, t) + w.bias).chunk(3, dim=-1)
    z = z.sigmoid() if update_offset is None else (-z - update_offset).sigmoid()
    n = (r.sigmoid() * n).tanh()
    # Without a norm, gates may be half precision, unlike the state.
    return (torch.lerp(n.to(h.dtype), h, z.to(h.dtype)),)


def light_gru_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """GRU without a reset gate (Ravanelli et al. 2018, arXiv 1803.10225), gates a, z."""
    (h,) = states
    a, z = (wx + sites["recurrent"](linear(w.dropped(h), w.hh), t) + w.bias).chunk(2, dim=-1)
    z = z.sigmoid()
    return ((1 - z) * a.relu() + z * h,)


def _rnn_sums(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> Tensor:
    return sites["sum"](wx + linear(w.dropped(states[0]), w.hh), t) + w.bias


def rnn_tanh_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """Simple RNN (paper, eq. 4) with tanh and a norm of the sum of both terms."""
    return (_rnn_sums(wx, states, w, sites, t).tanh(),)


def rnn_relu_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """Simple RNN (paper, eq. 4) with ReLU and a norm of the sum of both terms."""
    return (_rnn_sums(wx, states, w, sites, t).relu(),)


_LSTM_PLACES = (
    Place("input", (4,), weight="ih"),
    Place("recurrent", (4,), weight="hh"),
    Place("cell", (1,), own_shift=True),
)
# As in eq. 26-28, both gates share statistics, and the candidate has its own.
_GRU_PLACES = (
    Place("input", (2, 1), weight="ih"),
    Place("recurrent", (2, 1), weight="hh"),
)
_INNER_BIAS = (("prenorm_bias", 3),)


def _summed(gates: int) -> tuple[Place, ...]:
    return (
        Place("input", (gates,), weight="ih", sums=False),
        Place("recurrent", (gates,), weight="hh", sums=False),
        Place("sum", (gates,), products=("ih", "hh")),
    )


def _lstm(name: str, joint: bool = False, carried: bool = False) -> Cell:
    step = functools.partial(lstm_step, joint=joint, carried=carried)
    first, second = (None, "sum") if joint else ("input", "recurrent")
    return Cell(
        name,
        step if joint or carried else lstm_step,
        (*_summed(4), _LSTM_PLACES[2]) if joint else _LSTM_PLACES,
        states=("h", "c"),
        candidates=(2,),
        forget=(1,),
        projects=True,
        drops=True,
        form=Form("LSTM", (first, second, "cell"), joint, carried),
    )


def _gru(name: str, places: tuple[Place, ...], inner_bias: bool = False) -> Cell:
    return Cell(
        name,
        gru_step,
        places,
        weights=_INNER_BIAS if inner_bias else (),
        candidates=(2,),
        drops=True,
        form=Form("GRU", ("term" if inner_bias else "input", "recurrent", None)),
    )


def _joint_gru(name: str, inner_bias: bool) -> Cell:
    offset = -1.0
    return Cell(
        name,
        functools.partial(joint_gru_step, update_offset=offset),
        _summed(3),
        weights=_INNER_BIAS if inner_bias else (),
        candidates=(2,),
        drops=True,
        form=Form("GRU", (None, "sum", None), joint=True, update_offset=offset),
    )


def _rnn(name: str, step: Step) -> Cell:
    form = Form(name, (None, None, "sum"))
    return Cell(name, step, _summed(1), candidates=(0,), drops=True, form=form)


#: Cells with kernels, by name; torch's by the ``mode`` of `torch.nn.RNNBase`. Equations of other
#: libraries' cells: docs/explanation/dialects.md.
CELLS = {
    cell.name: cell
    for cell in (
        _lstm("LSTM"),
        _gru("GRU", _GRU_PLACES),
        _rnn("RNN_TANH", rnn_tanh_step),
        _rnn("RNN_RELU", rnn_relu_step),
        Cell(
            "light GRU",
            light_gru_step,
            (Place("input", (2,), weight="ih"), Place("recurrent", (2,), weight="hh")),
            candidates=(0,),
            drops=True,
            form=Form("light GRU", ("input", "recurrent", None)),
        ),
        _lstm("LSTM with a normalised carry", carried=True),
        _lstm("LSTM with a joint norm", joint=True),
        _lstm("LSTM with a joint norm and a normalised carry", joint=True, carried=True),
        _joint_gru("Dreamer's GRU", inner_bias=False),
        _joint_gru("Dreamer's GRU with a bias inside the norm", inner_bias=True),
        _gru(
            "GRU with one norm of gates and candidate",
            (Place("input", (3,), weight="ih"), Place("recurrent", (3,), weight="hh")),
        ),
        _gru(
            "GRU with a bias inside the norm",
            (
                Place("input", (3,), weight="ih", sums=False),
                _GRU_PLACES[1],
                Place("term", (2, 1), products=("ih",)),
            ),
            inner_bias=True,
        ),
    )
}
LIGHT_GRU = CELLS["light GRU"]
CARRIED_LSTM = CELLS["LSTM with a normalised carry"]
JOINT_LSTM = CELLS["LSTM with a joint norm"]
JOINT_CARRIED_LSTM = CELLS["LSTM with a joint norm and a normalised carry"]
DREAMER_GRU = CELLS["Dreamer's GRU"]
DREAMER_GRU_INNER_BIAS = CELLS["Dreamer's GRU with a bias inside the norm"]
WHOLE_GRU = CELLS["GRU with one norm of gates and candidate"]
PRENORM_GRU = CELLS["GRU with a bias inside the norm"]


@functools.cache
def kernel_cell(arithmetic: str, joint: bool, carried: bool) -> Cell:
    """The cell that kernels compute; update offsets and inner biases are folded before."""
    if arithmetic == "LSTM":
        return _lstm(arithmetic, joint, carried)
    if not joint:
        return CELLS[arithmetic]
    form = Form(arithmetic, (None, "sum", None), joint)
    return replace(DREAMER_GRU, step=joint_gru_step, form=form)


def lstm_cell(peephole: bool = False, derivative_bound: float | None = None) -> Cell:
    """An LSTM, optionally with peepholes (Graves 2013, eq. 7-10).

    ``derivative_bound`` clips the derivative of the loss with respect to pre-activations (Graves
    2013, section 2.1); ValueError unless it is positive.
    """
    cell = CELLS["LSTM"]
    if peephole:
        cell = replace(
            cell,
            name="LSTM with peepholes",
            step=peephole_lstm_step,
            weights=(("peephole", 3),),
            form=None,
        )
    if derivative_bound is None:
        return cell
    if not derivative_bound > 0:
        raise ValueError(f"derivative_bound must be positive, got {derivative_bound!r}")
    clip = functools.partial(clip_derivative, bound=derivative_bound)
    step = functools.partial(peephole_lstm_step if peephole else lstm_step, clip=clip)
    return replace(cell, name=f"{cell.name}, clipped", step=step, unclipped=cell, form=None)
