"""A recurrent layer that moves a soft window along a text and reads it back (Graves 2013, 5.1).

At each step the layer reads an input x_t beside the window w_{t-1} of the step before, and its
state h_t moves the window on. With K Gaussians and a text of vectors c_1 ... c_U::

    (alpha^, beta^, kappa^) = W h_t + b                                          (eq. 48)
    alpha_t = exp alpha^,  beta_t = exp beta^,  kappa_t = kappa_{t-1} + exp kappa^   (49-51)
    phi(t, u) = sum_k alpha_k exp(-beta_k (kappa_k - u)^2)                       (eq. 46)
    w_t = sum_u phi(t, u) c_u                                                    (eq. 47)

The loop runs in C++ on the native engine, with gradients written out. Weights have one product
each over all steps of a chunk; what is in the loop is what depends on the step before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ln_zoo.ops.cells import CELLS, Weights
from ln_zoo.ops.checks import check_parameters
from ln_zoo.ops.dispatch import allowed
from ln_zoo.ops.engines.base import ENGINES, Engine, Saved, Sums, centred
from ln_zoo.ops.engines.native.steps import NativeEngine
from ln_zoo.ops.engines.native.window import NativeWindow
from ln_zoo.ops.operator import chunks, no_autocast, previous_rows
from ln_zoo.ops.records import Records
from ln_zoo.ops.recurrent_kernel import untraceable
from ln_zoo.ops.spec import Operands, Spec, gather, refusal, specify

#: Engines that have this loop.
_ENGINES = ("native",)
#: Below so many steps nothing is gained over functions of torch with gradients of their own.
_LEAST_STEPS = 16


class WindowOperands(NamedTuple):
    """What the window has beside the recurrent layer's own tensors; all in its precision.

    Attributes:
        weight: W, (3K, H), in the order alpha, beta, kappa.
        bias: b, (3K,).
        text: the vectors c, (N, U, E), zeros behind the end of each text.
        window: w_0, (N, E).
        kappa: kappa_0, (N, K).
    """

    weight: Tensor
    bias: Tensor
    text: Tensor
    window: Tensor
    kappa: Tensor


class Windowed(NamedTuple):
    """What `windowed_lstm` gives.

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


def window_engine(
    records: Records, x: Tensor, weights: Weights, windows: WindowOperands
) -> str | None:
    """The engine that `windowed_lstm` runs on; ``None``: it cannot take this call.

    The environment variable ``LN_ZOO_KERNELS`` chooses among engines, as for all kernels.

    Args:
        records: what happens to summed inputs, by role.
        x: inputs, (T, N, I).
        weights: the effective weights; ``ih`` is (4H, I + E).
        windows: the window's tensors.
    """
    cell = CELLS["LSTM"]
    if torch.compiler.is_compiling() or untraceable() or refusal(cell, [records], [weights]):
        return None
    if x.shape[0] < _LEAST_STEPS or windows.text.requires_grad:
        return None
    if any(a.dtype != weights.hh.dtype for a in (x, *windows)) or not x.is_floating_point():
        return None
    if torch.promote_types(x.dtype, torch.float32) != x.dtype:
        return None
    names = [kernel.name for kernel in allowed(os.environ.get("LN_ZOO_KERNELS", ""))[0]]
    spec = specify(cell, records, weights)
    for name in _ENGINES:
        if name in names and ENGINES[name].refuses(spec, x, weights.hh, x.dtype) is None:
            return name
    return None


def windowed_lstm(
    engine: str,
    records: Records,
    x: Tensor,
    states: tuple[Tensor, Tensor],
    weights: Weights,
    windows: WindowOperands,
) -> Windowed:
    """Runs the layer over a sequence; it has no gradients of gradients.

    Args:
        engine: what `window_engine` said.
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
        return Windowed(*_WindowedLSTM.apply(spec, engine, save, *tensors))


class _WindowedLSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: Spec, name: str, save: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        operands, windows = _split(tensors)
        engine = ENGINES[name]
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
        # An engine may leave some as they are: what it gives shall be the same from run to run.
        stats = empty(rows if save else 0, engine.stats(spec)).zero_()
        p = engine.prepare(spec, operands, backward=False)
        run = NativeWindow(cast(NativeEngine, engine), p, spec, operands, windows, backward=False)
        pieces = chunks([examples] * steps, p.chunk_rows, p.least_steps)
        scratch = empty(0 if save else max(piece.last - piece.first for piece in pieces), width)
        for piece in pieces:
            part = slice(piece.first, piece.last)
            products = v[part] if save else scratch[: piece.last - piece.first]
            torch.mm(_rows(x, part), p.w_ih[:, :inputs].t(), out=products)
            kept = Saved(products, u[part], cells[part], stats[part]) if save else None
            run.forward(
                piece,
                products,
                h,
                c,
                flat_out[part],
                kept,
                window,
                kappa,
                flat_shown[part],
                flat_terms[part],
            )
        ctx.spec, ctx.engine = spec, name
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(terms)
        if save:
            ctx.save_for_backward(*tensors, out, shown, terms, v, u, cells, stats)
        return out, shown, h, c, kappa, terms

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the kernels of a layer with a window have no gradients of gradients: set the "
                "environment variable LN_ZOO_KERNELS=0 where you ask for them (create_graph=True)"
            )
        saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
        with no_autocast(saved[0]):
            return _gradients(ctx, saved, *grads)


def _gradients(
    ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """What `_WindowedLSTM` takes back."""
    *tensors, out, shown, terms, v, u, cells, stats = saved
    operands, windows = _split(tensors)
    needs = ctx.needs_input_grad[3:]
    needed, _ = _split(needs)
    spec, engine = ctx.spec, ENGINES[ctx.engine]
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
    sums = Sums(*(sum_of(name) for name in Operands._fields[5:]))
    dx = empty(steps * examples, inputs) if needed.x else None
    dw_ih, dw_hh = torch.zeros_like(operands.w_ih), torch.zeros_like(operands.w_hh)
    dweight, dbias = torch.zeros_like(windows.weight), torch.zeros_like(windows.bias)
    p = engine.prepare(spec, operands, backward=True)
    run = NativeWindow(cast(NativeEngine, engine), p, spec, operands, windows, backward=True)
    pieces = chunks([examples] * steps, p.chunk_rows, p.least_steps)
    longest = max(piece.last - piece.first for piece in pieces)
    du_room, dv_room = empty(longest, width), empty(longest, width)
    parameters_room = empty(longest, len(windows.bias))
    out, shown, terms = out.flatten(0, 1), shown.flatten(0, 1), terms.flatten(0, 1).flatten(1)
    for piece in reversed(pieces):
        part, count = slice(piece.first, piece.last), piece.last - piece.first
        first = piece is pieces[-1]
        du, dv, parameters = (a[:count] for a in (du_room, dv_room, parameters_room))
        h_prev = previous_rows(h0, out, piece)
        run.backward(
            piece,
            None if d_out is None else _rows(d_out, part),
            None if d_windows is None else _rows(d_windows, part),
            dh,
            dc,
            dwindow,
            dkappa,
            Saved(v[part], u[part], cells[part], stats[part]),
            terms[part],
            h_prev,
            previous_rows(c0, cells, piece),
            du,
            dv,
            parameters,
            sums,
        )
        read = torch.cat([_rows(x, part), previous_rows(windows.window, shown, piece)], 1)
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
    of_layer = (dx, dw_ih, dw_hh, dh, dc, *vars(sums).values())
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


def _rows(a: Tensor, part: slice) -> Tensor:
    """Rows of a (T, N, F), contiguous."""
    examples = a.shape[1]
    steps = slice(part.start // max(examples, 1), part.stop // max(examples, 1))
    return a[steps].reshape(-1, a.shape[2]).contiguous()
