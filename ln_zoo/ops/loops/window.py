"""A recurrent layer that moves a soft window along a text and reads it back (Graves 2013, 5.1).

At each step the layer reads an input x_t beside the window w_{t-1} of the step before, and its
state h_t moves the window on. With K Gaussians and a text of vectors c_1 ... c_U::

    (alpha^, beta^, kappa^) = W h_t + b                                          (eq. 48)
    alpha_t = exp alpha^,  beta_t = exp beta^,  kappa_t = kappa_{t-1} + exp kappa^   (49-51)
    phi(t, u) = sum_k alpha_k exp(-beta_k (kappa_k - u)^2)                       (eq. 46)
    w_t = sum_u phi(t, u) c_u                                                    (eq. 47)

The loop runs in C++ on the native engine and as Triton kernels on GPUs, with gradients written out.
It contains only what depends on the step before; all other products run over all steps of a chunk
at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ln_zoo.ops.cells import CELLS, Weights
from ln_zoo.ops.checks import check_parameters
from ln_zoo.ops.engines.base import Chunk, ChunkGrads, Engine, Saved, Sums, centred
from ln_zoo.ops.operator import check_first_order, no_autocast
from ln_zoo.ops.records import Records
from ln_zoo.ops.recurrent_kernel import untraceable
from ln_zoo.ops.registry import Task, say_unsupported, select
from ln_zoo.ops.spans import previous_rows, rows_of, spans
from ln_zoo.ops.spec import Operands, Spec, gather, specify, unsupported_reason

#: Below this many steps nothing is gained over torch functions and autograd.
_LEAST_STEPS = 16


class WindowOperands(NamedTuple):
    """What the window has besides the recurrent layer's own tensors; all in its precision.

    Attributes:
        weight: W, (3K, H), in the order alpha, beta, kappa.
        bias: b, (3K,).
        text: the vectors c, (N, U, E), zeros after the end of each text.
        window: w_0, (N, E).
        kappa: kappa_0, (N, K).
    """

    weight: Tensor
    bias: Tensor
    text: Tensor
    window: Tensor
    kappa: Tensor


class Windowed(NamedTuple):
    """What `windowed_lstm` returns.

    Attributes:
        output: states h, (T, N, H).
        windows: w, (T, N, E).
        h: the last state, (N, H).
        c: the last cell state, (N, H).
        kappa: the last places, (N, K).
        terms: alpha, beta, exp kappa^ and kappa of each step, (T, N, 4, K); without gradients.
    """

    output: Tensor
    windows: Tensor
    h: Tensor
    c: Tensor
    kappa: Tensor
    terms: Tensor


def window_weights(terms: Tensor, characters: int) -> Tensor:
    """phi, the share that each character has in each window (eq. 46).

    Args:
        terms: alpha, beta, anything and kappa, (\\*, 4, K).
        characters: U, so that phi is given at u = 1 ... U.

    Returns:
        (\\*, U).
    """
    alpha, beta, _, kappa = (part.unsqueeze(-1) for part in terms.unbind(-2))
    places = torch.arange(1, characters + 1, dtype=terms.dtype, device=terms.device)
    return (alpha * torch.exp(-beta * (kappa - places).square())).sum(-2)


class WindowSteps(Protocol):
    """Runs chunks of steps of the layer and its window; made once per call."""

    def __init__(
        self,
        steps: Any,
        spec: Spec,
        operands: Operands,
        windows: WindowOperands,
        backward: bool,
    ) -> None:
        """Packs what is the same for all chunks.

        Args:
            steps: what the engine prepared for the layer.
            spec: what is computed.
            operands: the layer's tensors.
            windows: the window's.
            backward: whether it is for the backward pass.
        """

    def forward(self, chunk: Chunk, window: WindowChunk) -> None:
        """Runs consecutive steps; the window's part of the products v is added."""

    def backward(self, grads: ChunkGrads, window: WindowGrads) -> None:
        """Takes gradients back through the steps of one call of `forward`."""


class WindowChunk(NamedTuple):
    """What the window has besides the layer's `Chunk`; all contiguous.

    Attributes:
        window: w before the steps, (N, E); updated in place.
        kappa: the places, (N, K); updated in place.
        shown: to be filled with the windows, (rows, E).
        terms: to be filled with what makes them, (rows, 4K); see `Windowed`.
    """

    window: Tensor
    kappa: Tensor
    shown: Tensor
    terms: Tensor


class WindowGrads(NamedTuple):
    """The same in the backward pass.

    Attributes:
        dshown: gradient of ``shown``; ``None`` for 0.
        dwindow: gradient of the last window, left as that of the one before the steps, (N, E).
        dkappa: the same of the places, (N, K).
        terms: what the forward filled in.
        parameters: to be filled with the gradients of alpha^, beta^ and kappa^, (rows, 3K).
    """

    dshown: Tensor | None
    dwindow: Tensor
    dkappa: Tensor
    terms: Tensor
    parameters: Tensor


class WindowKernel:
    """An engine that has this loop.

    Args:
        engine: the engine.
        steps: its loop.
    """

    tasks: tuple[Task, ...] = ("window",)

    def __init__(self, engine: Engine, steps: type[WindowSteps]) -> None:
        self.engine, self.steps = engine, steps
        self.name, self.title = engine.name, engine.title

    def missing(self) -> str | None:
        """What this machine lacks for the engine, or ``None``."""
        return self.engine.missing()

    def unsupported_reason(
        self, records: Records, x: Tensor, weights: Weights, windows: WindowOperands
    ) -> str | None:
        """Why it cannot take this call, or ``None``; arguments as for `select_window_kernel`."""
        cell = CELLS["LSTM"]
        if torch.compiler.is_compiling():
            return "a compiled program holds functions of torch alone"
        reason = untraceable() or unsupported_reason(cell, [records], [weights])
        if reason is not None:
            return reason
        if x.shape[0] < _LEAST_STEPS:
            return f"it gains nothing below {_LEAST_STEPS} steps"
        if windows.text.requires_grad:
            return "it has no gradients of the text"
        if any(a.dtype != weights.hh.dtype for a in (x, *windows)) or not x.is_floating_point():
            return "precisions differ"
        if x.dtype != torch.float32:
            return f"it computes in float32 alone, not in {str(x.dtype).removeprefix('torch.')}"
        return self.engine.unsupported_reason(
            specify(cell, records, weights), x, weights.hh, x.dtype
        )


def select_window_kernel(
    records: Records,
    x: Tensor,
    weights: Weights,
    windows: WindowOperands,
    unsupported: str | None = None,
) -> WindowKernel | None:
    """The kernel that `windowed_lstm` runs on; ``None``: none can take this call.

    The environment variable ``LN_ZOO_KERNELS`` chooses, as for all kernels, and the log says what
    runs.

    Args:
        records: what happens to summed inputs, by role.
        x: inputs, (T, N, I).
        weights: the effective weights; ``ih`` is (4H, I + E).
        windows: the window's tensors.
        unsupported: why the layer itself is not one that `windowed_lstm` computes.
    """
    what, otherwise = "an LSTM with a window", "functions of torch"
    if unsupported is not None:
        say_unsupported(what, otherwise, f": {unsupported}")
        return None
    found: WindowKernel | None = select("window", what, (records, x, weights, windows), otherwise)
    return found


def windowed_lstm(
    kernel: WindowKernel,
    records: Records,
    x: Tensor,
    states: tuple[Tensor, Tensor],
    weights: Weights,
    windows: WindowOperands,
) -> Windowed:
    """Runs the layer over a sequence.

    It takes neither gradients of gradients nor batches of gradients.

    Args:
        kernel: what `select_window_kernel` gave.
        records: what happens to summed inputs, by role.
        x: inputs, (T, N, I).
        states: h_0 and c_0, each (N, H).
        weights: the effective weights; ``ih`` is (4H, I + E).
        windows: the window's tensors.

    Raises:
        RuntimeError: if sizes, precisions or devices do not fit.
    """
    cell, hidden = CELLS["LSTM"], states[0].shape[1]
    sizes = x.shape[2] + windows.window.shape[1], hidden, hidden
    spec = specify(cell, records, weights)
    with no_autocast(x):
        check_parameters(cell, records, weights, x, sizes)
        operands = gather(cell, records, weights, x, tuple(s.contiguous() for s in states))
        tensors = (*operands, *(a.contiguous() for a in windows))
        save = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in tensors)
        return Windowed(*_WindowedLSTM.apply(spec, kernel, save, *tensors))


class _WindowedLSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: Spec, kernel: WindowKernel, save: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        operands, windows = _split(tensors)
        engine = kernel.engine
        x = operands.x
        steps, examples, inputs = x.shape
        width, hidden = operands.w_hh.shape
        rows, kinds = steps * examples, windows.kappa.shape[1]
        empty = _allocator(engine, x)
        h, c = operands.h0.clone(), _there(operands.c0).clone()
        window, kappa = windows.window.clone(), windows.kappa.clone()
        out, shown = empty(steps, examples, hidden), empty(steps, examples, window.shape[1])
        terms = empty(steps, examples, 4, kinds)
        flat_out, flat_shown = out.flatten(0, 1), shown.flatten(0, 1)
        flat_terms = terms.view(rows, 4 * kinds)
        v, u, cells = (empty(rows if save else 0, n) for n in (width, width, hidden))
        # An engine may leave some of them unset: results must be the same from run to run.
        stats = empty(rows if save else 0, engine.stats(spec)).zero_()
        p = engine.prepare(spec, operands, backward=False)
        run = kernel.steps(p, spec, operands, windows, backward=False)
        pieces = spans([examples] * steps, p.rows_of_chunk(save), p.least_steps)
        scratch = empty(0 if save else max(piece.count for piece in pieces), width)
        for piece in pieces:
            part = piece.rows
            products = v[part] if save else scratch[: piece.count]
            torch.mm(rows_of(x, False, piece), p.w_ih[:, :inputs].t(), out=products)
            saved = Saved(products, u[part], cells[part], stats[part]) if save else None
            run.forward(
                Chunk(piece.sizes, products, h, c, flat_out[part], saved),
                WindowChunk(window, kappa, flat_shown[part], flat_terms[part]),
            )
        ctx.spec, ctx.kernel = spec, kernel
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(terms)
        if save:
            ctx.save_for_backward(*tensors, out, shown, terms, v, u, cells, stats)
        return out, shown, h, c, kappa, terms

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_order("the kernels of a layer with a window", grads)
        saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
        with no_autocast(saved[0]):
            return _gradients(ctx, saved, *grads)


def _gradients(
    ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients that `_WindowedLSTM` returns."""
    *tensors, out, shown, terms, v, u, cells, stats = saved
    operands, windows = _split(tensors)
    needs = ctx.needs_input_grad[3:]
    needed, _ = _split(needs)
    spec, kernel = ctx.spec, ctx.kernel
    engine = kernel.engine
    d_out, d_windows, d_h, d_c, d_kappa, _ = grads
    x, h0, c0 = operands.x, operands.h0, _there(operands.c0)
    steps, examples, inputs = x.shape
    width = len(operands.w_hh)
    empty = _allocator(engine, x)

    def start(d: Tensor | None, like: Tensor) -> Tensor:
        if d is None:
            return torch.zeros_like(like)
        return d.clone(memory_format=torch.contiguous_format)

    def sum_of(name: str) -> Tensor | None:
        value = getattr(operands, name)
        return torch.zeros_like(value) if getattr(needed, name) else None

    dh, dc = start(d_h, h0), start(d_c, c0)
    dkappa, dwindow = start(d_kappa, windows.kappa), torch.zeros_like(windows.window)
    sums = Sums(*(sum_of(name) for name in Sums._fields))
    dx = empty(steps * examples, inputs) if needed.x else None
    dw_ih, dw_hh = torch.zeros_like(operands.w_ih), torch.zeros_like(operands.w_hh)
    dweight, dbias = torch.zeros_like(windows.weight), torch.zeros_like(windows.bias)
    p = engine.prepare(spec, operands, backward=True)
    run = kernel.steps(p, spec, operands, windows, backward=True)
    pieces = spans([examples] * steps, p.rows_of_chunk(True), p.least_steps)
    longest = max(piece.count for piece in pieces)
    du_room, dv_room = empty(longest, width), empty(longest, width)
    parameters_room = empty(longest, len(windows.bias))
    out, shown, terms = out.flatten(0, 1), shown.flatten(0, 1), terms.flatten(0, 1).flatten(1)
    for piece in reversed(pieces):
        part, first = piece.rows, piece is pieces[-1]
        du, dv, parameters = (a[: piece.count] for a in (du_room, dv_room, parameters_room))
        h_prev = previous_rows(h0, out, piece)
        grads_of_layer = ChunkGrads(
            sizes=piece.sizes,
            dout=None if d_out is None else rows_of(d_out, False, piece),
            dh=dh,
            dc=dc,
            saved=Saved(v[part], u[part], cells[part], stats[part]),
            h_prev=h_prev,
            c_prev=previous_rows(c0, cells, piece),
            du=du,
            dv=dv,
            sums=sums,
        )
        dshown = None if d_windows is None else rows_of(d_windows, False, piece)
        run.backward(grads_of_layer, WindowGrads(dshown, dwindow, dkappa, terms[part], parameters))
        read = torch.cat([rows_of(x, False, piece), previous_rows(windows.window, shown, piece)], 1)
        p.add_weight_gradient(du, h_prev, dw_hh, first)
        p.add_weight_gradient(dv, read, dw_ih, first)
        dweight.addmm_(parameters.t(), out[part])
        dbias += parameters.sum(0)
        if dx is not None:
            torch.mm(dv, p.w_ih[:, :inputs], out=dx[part])
    first_rows, second_rows = spec.products
    if p.leaves_constants:
        dw_ih, dw_hh = centred(dw_ih, first_rows), centred(dw_hh, second_rows)
    dx = None if dx is None else dx.view(x.shape)
    of_layer = (dx, dw_ih, dw_hh, dh, dc, *sums, None)  # no bias inside a norm
    of_window = (dweight, dbias, None, dwindow, dkappa)
    return (None, None, None, *of_layer, *of_window)


def _split(tensors: Any) -> tuple[Operands, WindowOperands]:
    count = len(Operands._fields)
    return Operands(*tensors[:count]), WindowOperands(*tensors[count:])


def _there(a: Tensor | None) -> Tensor:
    assert a is not None
    return a


def _allocator(engine: Engine, like: Tensor) -> Callable[..., Tensor]:
    return lambda *size: engine.empty(*size, like=like, dtype=like.dtype)
