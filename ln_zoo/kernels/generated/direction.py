"""A call of one direction of one layer, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ln_zoo.kernels.ctypes_arguments import KnownForms
from ln_zoo.kernels.generated.trace import StepForm
from ln_zoo.ops.cells import Cell, Sites, Weights

#: Place of the first state in `Tensors.flat`.
FIRST_STATE = 4


class Direction(NamedTuple):
    """A call of one direction, except for its tensors."""

    kernel: Any  # `Kernel`, or `TritonKernel` on a GPU
    cell: Cell
    sites: Sites
    weights: Weights  # the original ones, for their identities
    parameters: Sequence[Tensor]  # original ones, in the order of `parameters_of`
    form: StepForm
    sizes: Sequence[int] | None  # of packed data
    narrow: bool  # whether products are in bfloat16
    threads: int  # also of the backward pass, which reads what each has kept
    forms: KnownForms | None = None  # of weights and parameters, if calls have them in common
    recompute: int = 0  # steps of a piece, see `in_pieces`; 0: everything is kept


class Tensors(NamedTuple):
    """Tensors of a call, in float32; `flat` and `of` convert to a sequence and back.

    x is (T, N, I), (N, I) for a single step, or (rows, I) of packed data.
    States are (N, H) or (1, N, H), and so are final states.
    """

    x: Tensor
    w_ih: Tensor
    w_hh: Tensor
    w_hr: Tensor | None
    states: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    dropped: Tensor | None = None
    reset: Tensor | None = None
    held: tuple[Tensor | None, ...] = ()  # in the layout of x
    addresses: Sequence[int] | None = None  # of all, in the order of `Call::given`, if checked

    def is_step(self, d: Direction) -> bool:
        """Whether x is that of a single step, whose output is its first final state."""
        return d.sizes is None and self.x.dim() == 2

    def flat(self) -> list[Tensor | None]:
        first = [self.x, self.w_ih, self.w_hh, self.w_hr]
        return [*first, *self.states, *self.parameters, self.dropped, self.reset, *self.held]

    @classmethod
    def of(cls, d: Direction, flat: Sequence[Any]) -> Tensors:
        x, w_ih, w_hh, w_hr = flat[:FIRST_STATE]
        own = FIRST_STATE + len(d.cell.states)
        last = own + len(d.parameters)
        starts, parameters = tuple(flat[FIRST_STATE:own]), tuple(flat[own:last])
        held = tuple(flat[last + 2 :])
        return cls(x, w_ih, w_hh, w_hr, starts, parameters, flat[last], flat[last + 1], held)
