"""DRAW on an engine (equations: `ln_zoo.ops.loops.draw`).

An engine has the steps of a glimpse, forward and backward; here are the operator, its operands and
memory, the products between the steps, and the gradients of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ln_zoo.ops import memory
from ln_zoo.ops.cells import CELLS
from ln_zoo.ops.engines.base import Engine
from ln_zoo.ops.loops.draw import DrawLSTM, Drawn, DrawSettings, DrawWeights
from ln_zoo.ops.lowering import make_spec, unsupported_reason
from ln_zoo.ops.norm_records import RowNorm
from ln_zoo.ops.precision import no_autocast, product_dtype
from ln_zoo.ops.recurrent_kernel import no_custom_ops_reason
from ln_zoo.ops.registry import EngineKernel, Task
from ln_zoo.ops.replay import check_first_order
from ln_zoo.ops.spec import Rows

#: Indices of both LSTMs in pairs of tensors, and of the three narrow products.
ENCODER, DECODER, POSTERIOR = 0, 1, 2
#: Minimum rows of a product for weight gradients: full speed, and the operands fit the caches.
_CHUNK_ROWS = 1024
_LSTM = CELLS["LSTM"]


# Selection


class DrawEngine(Engine, Protocol):
    """An engine that has the steps of DRAW."""

    @property
    def draw_steps(self) -> type[DrawSteps]:
        """Class of the steps."""


class DrawKernel(EngineKernel):
    """Kernel of an engine that has the steps of DRAW."""

    engine: DrawEngine
    tasks: tuple[Task, ...] = ("DRAW",)

    def __init__(self, engine: DrawEngine) -> None:
        super().__init__(engine)

    @functools.cached_property
    def steps(self) -> type[DrawSteps]:
        return self.engine.draw_steps

    def unsupported_reason(self, images: Tensor, noise: Tensor, weights: DrawWeights) -> str | None:
        reason = _refusal(images, noise, weights) or self.steps.unsupported_reason(images, weights)
        if reason is not None:
            return reason
        narrow = self.steps.product_dtype(images)
        if narrow not in (images.dtype, torch.bfloat16):
            return f"it has no products in {_word(narrow)}"
        of = weights.encoder
        spec = make_spec(_LSTM, of.records, of.weights)
        return self.engine.unsupported_reason(spec, images, of.weights.hh, narrow)

    def run(
        self, settings: DrawSettings, images: Tensor, noise: Tensor, weights: DrawWeights
    ) -> Drawn:
        norms = _rows(weights.encoder), _rows(weights.decoder)
        plan = DrawPlan(settings, norms, self.steps.product_dtype(images))
        with no_autocast(images):
            tensors = (images.contiguous(), noise.contiguous(), *_lower(weights))
            needed = any(a is not None and a.requires_grad for a in tensors)
            save = torch.is_grad_enabled() and needed
            return Drawn(*_Draw.apply(self.steps, plan, save, *tensors))


def _refusal(images: Tensor, noise: Tensor, weights: DrawWeights) -> str | None:
    if torch.compiler.is_compiling():
        return "a compiled program holds functions of torch alone"
    lstms = (weights.encoder, weights.decoder)
    reason = no_custom_ops_reason() or unsupported_reason(
        _LSTM, [lstm.records for lstm in lstms], [lstm.weights for lstm in lstms]
    )
    if reason is not None:
        return reason
    for lstm in lstms:
        spec = make_spec(_LSTM, lstm.records, lstm.weights)
        if spec.input.scale or spec.recurrent.scale:
            return "the sums of the gates are normalised"
    if images.requires_grad or noise.requires_grad:
        return "it has no gradients of images and noise"
    for a in _tensors(images, noise, weights):
        if a.dtype != images.dtype:
            return f"precisions differ: {_word(images.dtype)} and {_word(a.dtype)}"
    if images.dtype != torch.float32:
        return f"it computes in float32, not in {_word(images.dtype)}"
    return None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The operator


class DrawOperands(NamedTuple):
    """Tensors of a call; weights are concatenated as their inputs are."""

    images: Tensor  # (N, B, A)
    noise: Tensor  # (T, N, Z)
    w_encoder: Tensor  # (4H, 2R^2 + H + H), of [r; h_dec; h_enc]
    w_decoder: Tensor  # (4H, Z + H), of [z; h_dec]
    b_encoder: Tensor  # (4H,)
    b_decoder: Tensor
    gain_encoder: Tensor | None  # (H,), as the next three; None: 1, and 0
    gain_decoder: Tensor | None
    shift_encoder: Tensor | None
    shift_decoder: Tensor | None
    w_posterior: Tensor  # (2Z, H)
    b_posterior: Tensor
    w_heads: Tensor  # (10 + W^2, H): read, write, patch
    b_heads: Tensor
    h_encoder: Tensor  # (H,), as the next three
    h_decoder: Tensor
    c_encoder: Tensor
    c_decoder: Tensor
    canvas: Tensor  # (B, A)


def _tensors(images: Tensor, noise: Tensor, weights: DrawWeights) -> list[Tensor]:
    found: list[Tensor | None] = [images, noise, weights.canvas]
    for lstm in (weights.encoder, weights.decoder):
        record = lstm.records["cell"]
        found += [*lstm.weights.tensors, lstm.h, lstm.c]
        if isinstance(record, RowNorm):
            found += [record.gain, record.shift]
    for affine in (weights.posterior, weights.read, weights.write, weights.patch):
        found += affine
    return [a for a in found if a is not None]


def _rows(lstm: DrawLSTM) -> Rows:
    return make_spec(_LSTM, lstm.records, lstm.weights).rows[2]


def _lower(weights: DrawWeights) -> tuple[Tensor | None, ...]:
    """Concatenate weights by product; differentiable."""

    def one(lstm: DrawLSTM) -> tuple[Tensor | None, ...]:
        w, record = lstm.weights, lstm.records["cell"]
        biases = [b for b in (w.bias_ih, w.bias_hh) if b is not None]
        bias = sum(biases[1:], biases[0]) if biases else w.hh.new_zeros(len(w.hh))
        gain = shift = None
        if isinstance(record, RowNorm) and not record.identity:
            gain, shift = record.gain, record.shift
        return torch.cat([w.ih, w.hh], 1), bias, gain, shift

    pairs = zip(one(weights.encoder), one(weights.decoder), strict=True)
    lstms = [None if a is None else a.contiguous() for pair in pairs for a in pair]
    heads = [torch.cat(p) for p in zip(weights.read, weights.write, weights.patch, strict=True)]
    states = (weights.encoder.h, weights.decoder.h, weights.encoder.c, weights.decoder.c)
    rest = (*weights.posterior, *heads, *states, weights.canvas)
    return (*lstms, *(a.contiguous() for a in rest))


@dataclass(frozen=True)
class DrawPlan:
    """Everything a run depends on besides tensors; ``narrow``: dtype of products."""

    settings: DrawSettings
    norms: tuple[Rows, Rows]
    narrow: torch.dtype


class Kept(NamedTuple):
    """Buffers of a run, saved for all glimpses if gradients are needed; pairs: encoder, decoder.

    Tensors with slots have one per glimpse, (T + 1, ...), slot 0 for the initial state, or two that
    alternate.
    """

    inputs: tuple[Tensor, Tensor]  # [r; h_dec; h_enc], [z; h_dec], (slots, N, I + H), narrow
    states: Tensor  # h_dec, (slots, N, H); a view of the inputs unless products are narrow
    heads: Tensor  # W_r, W_w and the patch applied to h_dec, (slots, N, 10 + W^2)
    gates: tuple[Tensor, Tensor]  # i, f, g, o, (slots, N, 4H)
    cells: tuple[Tensor, Tensor]  # (slots, N, H)
    stats: tuple[Tensor, Tensor]  # mean and reciprocal deviation of cell states, (slots, N, 2)
    canvases: Tensor  # C, (slots, N, B, A); the last one is the logits

    def flat(self) -> list[Tensor]:
        return [a for field in self for a in (field if isinstance(field, tuple) else (field,))]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Kept:
        a = tensors
        return Kept((a[0], a[1]), a[2], a[3], (a[4], a[5]), (a[6], a[7]), (a[8], a[9]), a[10])


class Made(NamedTuple):
    """Results of a run, and its scratch memory."""

    logits: Tensor  # (N, B, A)
    means: Tensor  # (T, N, Z)
    log_stds: Tensor  # (T, N, Z)
    sums: Tensor | None = None  # narrow products of an LSTM, (N, 4H), if not in the gates
    posterior: Tensor | None = None  # products of h_enc, (N, 2Z), in the dtype of products


class Back(NamedTuple):
    """Buffers of gradients in the backward pass; pairs: encoder, decoder.

    ``inputs``, ``encoded``, ``gates`` and ``posterior`` have the dtype of products. Row t % chunk
    of the last two is glimpse t.
    """

    means: Tensor | None  # (T, N, Z); None: 0
    log_stds: Tensor | None  # (T, N, Z); None: 0
    canvas: Tensor  # of the canvas after a glimpse, replaced by that before it, (N, B, A)
    heads: Tensor  # (T + 1, N, 10 + W^2), initially 0
    states: Tensor  # of h_dec through `heads`, (N, H)
    cells: tuple[Tensor, Tensor]  # (N, H)
    inputs: tuple[Tensor, Tensor]  # (N, I + H), initially 0
    encoded: Tensor  # of h_enc through `posterior`, (N, H)
    gates: tuple[Tensor, Tensor]  # of pre-activations, (chunk, N, 4H)
    posterior: Tensor  # (chunk, N, 2Z)


class DrawSteps:
    """The computation between the products of a glimpse t.

    The backward pass calls the methods in reverse order, each followed by the products of the
    tensors written to `Back`. ``weights`` belong to encoder, decoder and posterior, in the dtype of
    products.
    """

    def __init__(
        self,
        plan: DrawPlan,
        operands: DrawOperands,
        weights: Sequence[Tensor],
        kept: Kept,
        made: Made,
        back: Back | None,
    ) -> None:
        raise NotImplementedError

    @staticmethod
    def unsupported_reason(images: Tensor, weights: DrawWeights) -> str | None:
        """Why it does not support such a call, or None."""
        return None

    @staticmethod
    def product_dtype(images: Tensor) -> torch.dtype:
        return product_dtype(images)

    @staticmethod
    def replayed(
        plan: DrawPlan,
        operands: DrawOperands,
        save: bool,
        forward: Callable[[DrawOperands], DrawRun],
    ) -> tuple[tuple[Tensor, ...], Replay] | None:
        """Replay captured glimpses, or None; see `ln_zoo.kernels.triton.draw.replayed`."""
        return None

    def multiply(self, which: int, a: Tensor, out: Tensor) -> None:
        """Write a product with the weight to out: a W in the backward pass, otherwise a W^T."""

    def heads(self, states: Tensor, out: Tensor) -> None:
        """Write all heads of h_dec (N, H) to out, in full precision."""

    def heads_back(self, d: Tensor, out: Tensor) -> None:
        """Write the gradient of h_dec through the heads to out."""

    def read(self, t: int) -> None:
        """Compute r."""

    def lstm(self, which: int, t: int) -> None:
        """From the gates' products, without bias, to c and all copies of h."""

    def latent(self, t: int) -> None:
        """From the products of h_enc, without bias, to z."""

    def write(self, t: int) -> None:
        """Compute the next canvas."""

    def read_back(self, t: int) -> None:
        """Write the read filters' part of ``heads[t]``, and update ``canvas``."""

    def lstm_back(self, which: int, t: int) -> None:
        """Write ``gates``, and update ``cells``."""

    def latent_back(self, t: int) -> None:
        """Write ``posterior``."""

    def write_back(self, t: int) -> None:
        """Write ``heads[t + 1]``, except the read filters' part."""

    def clamped(self) -> Tensor:
        raise NotImplementedError

    def totals(self) -> Sequence[Tensor]:
        """Gradients of vectors, summed over glimpses and examples.

        Encoder: bias (4H,), gain and shift (H,); the same of the decoder; posterior bias (2Z,).
        """
        raise NotImplementedError


class DrawRun(NamedTuple):
    """All glimpses of a call."""

    kept: Kept
    made: Made
    clamped: Tensor

    @property
    def results(self) -> tuple[Tensor, ...]:
        return self.made.logits, self.made.means, self.made.log_stds, self.clamped


class Replay(Protocol):
    """A captured run, for its gradients."""

    def gradients(
        self,
        grads: Sequence[Tensor | None],
        backward: Callable[[DrawOperands, DrawRun, Sequence[Tensor | None]], DrawOperands],
    ) -> DrawOperands:
        """Gradients of the operands, in new memory; ``backward`` is captured on first use."""


class _Draw(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: type[DrawSteps], plan: DrawPlan, save: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        operands = DrawOperands(*tensors)
        forward = functools.partial(_run, kind, plan, save=save)
        ctx.kind, ctx.plan = kind, plan
        ctx.set_materialize_grads(False)
        found = kind.replayed(plan, operands, save, forward)
        ctx.replay = None
        if found is None:
            run = forward(operands)
            results = run.results
            if save:
                ctx.save_for_backward(*operands, run.made.log_stds, *run.kept.flat())
        else:
            # The captured run holds all tensors for the gradients, with copies of the operands.
            results, replay = found
            ctx.replay = replay if save else None
        ctx.mark_non_differentiable(results[-1])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_order("the kernels of DRAW", grads)
        if ctx.replay is not None:
            kind, plan = ctx.kind, ctx.plan

            def backward(
                operands: DrawOperands, run: DrawRun, grads: Sequence[Tensor | None]
            ) -> DrawOperands:
                with no_autocast(operands.noise):
                    return _gradients(kind, plan, operands, run.made.log_stds, run.kept, grads)

            found = ctx.replay.gradients(grads[:3], backward)
        else:
            saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
            count = len(DrawOperands._fields)
            operands, kept = DrawOperands(*saved[:count]), Kept.of(saved[count + 1 :])
            with no_autocast(saved[0]):
                found = _gradients(ctx.kind, ctx.plan, operands, saved[count], kept, grads[:3])
        needed = ctx.needs_input_grad[3:]
        return (None, None, None, *(d if n else None for d, n in zip(found, needed, strict=True)))


def _run(kind: type[DrawSteps], plan: DrawPlan, operands: DrawOperands, save: bool) -> DrawRun:
    kept, made = _allocate(plan, operands, save)
    steps = kind(plan, operands, _weights(plan, operands), kept, made, None)
    slots, hidden = len(kept.cells[0]), len(operands.h_decoder)
    inputs, of_decoder = kept.inputs
    _start(operands, kept)
    for t in range(len(operands.noise)):
        before, after = t % slots, (t + 1) % slots
        steps.read(t)
        steps.multiply(ENCODER, inputs[before], _sums(kept, made, ENCODER, before))
        steps.lstm(ENCODER, t)
        steps.multiply(POSTERIOR, inputs[after, :, -hidden:], _there(made.posterior))
        steps.latent(t)
        steps.multiply(DECODER, of_decoder[before], _sums(kept, made, DECODER, before))
        steps.lstm(DECODER, t)
        steps.heads(kept.states[after], kept.heads[after])
        steps.write(t)
    return DrawRun(kept, made, steps.clamped())


def _gradients(
    kind: type[DrawSteps],
    plan: DrawPlan,
    operands: DrawOperands,
    log_stds: Tensor,
    kept: Kept,
    grads: Sequence[Tensor | None],
) -> DrawOperands:
    back = _allocate_back(plan, operands, grads)
    made = Made(operands.images, log_stds, log_stds)  # placeholders: logits and means are not read
    weights = _weights(plan, operands)
    steps = kind(plan, operands, weights, kept, made, back)
    glimpses, hidden, chunk = len(operands.noise), len(operands.h_decoder), len(back.posterior)
    totals = [torch.zeros_like(w, dtype=log_stds.dtype) for w in weights]
    encoded = kept.inputs[ENCODER][1:, :, -hidden:]
    pairs = list(zip(totals, (*back.gates, back.posterior), (*kept.inputs, encoded), strict=True))
    for t in reversed(range(glimpses)):
        row = t % chunk
        steps.write_back(t)
        steps.heads_back(back.heads[t + 1], back.states)
        steps.lstm_back(DECODER, t)
        steps.multiply(DECODER, back.gates[DECODER][row], back.inputs[DECODER])
        steps.latent_back(t)
        steps.multiply(POSTERIOR, back.posterior[row], back.encoded)
        steps.lstm_back(ENCODER, t)
        steps.multiply(ENCODER, back.gates[ENCODER][row], back.inputs[ENCODER])
        steps.read_back(t)
        if row == 0:
            last = min(t + chunk, glimpses)
            for total, d, a in pairs:
                _add_product(total, d[: last - t], a[t:last])
    b_encoder, gain_encoder, shift_encoder, *others = steps.totals()
    b_decoder, gain_decoder, shift_decoder, b_posterior = others
    by_encoder, by_decoder = back.inputs
    dh_decoder = torch.mm(back.heads[0], operands.w_heads)
    dh_decoder += by_encoder[:, -2 * hidden : -hidden]
    dh_decoder += by_decoder[:, -hidden:]
    return DrawOperands(
        images=cast(Tensor, None),
        noise=cast(Tensor, None),
        w_encoder=totals[ENCODER],
        w_decoder=totals[DECODER],
        b_encoder=b_encoder,
        b_decoder=b_decoder,
        gain_encoder=gain_encoder,
        gain_decoder=gain_decoder,
        shift_encoder=shift_encoder,
        shift_decoder=shift_decoder,
        w_posterior=totals[POSTERIOR],
        b_posterior=b_posterior,
        w_heads=torch.mm(back.heads.flatten(0, 1).t(), kept.states.flatten(0, 1)),
        b_heads=back.heads.sum((0, 1)),
        h_encoder=by_encoder[:, -hidden:].sum(0, dtype=log_stds.dtype),
        h_decoder=dh_decoder.sum(0),
        c_encoder=back.cells[ENCODER].sum(0),
        c_decoder=back.cells[DECODER].sum(0),
        canvas=back.canvas.sum(0),
    )


def _add_product(total: Tensor, d: Tensor, a: Tensor) -> None:
    """Add the weight gradient of d (chunk, N, O) and a (chunk, N, I) to total (O, I)."""
    d, a = d.flatten(0, 1).t(), a.flatten(0, 1)
    if total.dtype == a.dtype:
        total.addmm_(d, a)
    else:
        total += torch.mm(d, a)


def _there(a: Tensor | None) -> Tensor:
    assert a is not None
    return a


def _sums(kept: Kept, made: Made, which: int, slot: int) -> Tensor:
    return kept.gates[which][slot] if made.sums is None else made.sums


def _weights(plan: DrawPlan, operands: DrawOperands) -> list[Tensor]:
    weights = (operands.w_encoder, operands.w_decoder, operands.w_posterior)
    return [w.to(plan.narrow) for w in weights]


def _allocate(plan: DrawPlan, operands: DrawOperands, save: bool) -> tuple[Kept, Made]:
    glimpses, examples, latents = operands.noise.shape
    hidden, heads = len(operands.h_decoder), len(operands.b_heads)
    slots = glimpses + 1 if save else 2
    wide, narrow = operands.noise.dtype, plan.narrow

    def empty(*size: int, dtype: torch.dtype = wide) -> Tensor:
        return memory.empty(*size, like=operands.noise, dtype=dtype)

    def slotted(*size: int, dtype: torch.dtype = wide) -> Tensor:
        return memory.pooled_empty(slots, examples, *size, like=operands.noise, dtype=dtype)

    def both(*size: int) -> tuple[Tensor, Tensor]:
        return slotted(*size), slotted(*size)

    widths = (operands.w_encoder.shape[1], operands.w_decoder.shape[1])
    encoder, decoder = (slotted(width, dtype=narrow) for width in widths)
    kept = Kept(
        inputs=(encoder, decoder),
        states=decoder[:, :, latents:] if narrow == wide else slotted(hidden),
        heads=slotted(heads),
        gates=both(4 * hidden),
        cells=both(hidden),
        stats=both(2),
        canvases=slotted(*operands.canvas.shape),
    )
    made = Made(
        logits=empty(examples, *operands.canvas.shape),
        means=empty(glimpses, examples, latents),
        log_stds=empty(glimpses, examples, latents),
        sums=None if narrow == wide else empty(examples, 4 * hidden, dtype=narrow),
        posterior=empty(examples, 2 * latents, dtype=narrow),
    )
    return kept, made


def _start(operands: DrawOperands, kept: Kept) -> None:
    hidden = len(operands.h_decoder)
    encoder, decoder = kept.inputs
    encoder[0, :, -hidden:] = operands.h_encoder
    encoder[0, :, -2 * hidden : -hidden] = operands.h_decoder
    decoder[0, :, -hidden:] = operands.h_decoder
    kept.states[0] = operands.h_decoder
    kept.cells[ENCODER][0] = operands.c_encoder
    kept.cells[DECODER][0] = operands.c_decoder
    kept.canvases[0] = operands.canvas
    kept.heads[0] = torch.addmv(operands.b_heads, operands.w_heads, operands.h_decoder)


def _allocate_back(plan: DrawPlan, operands: DrawOperands, grads: Sequence[Tensor | None]) -> Back:
    glimpses, examples, latents = operands.noise.shape
    hidden, heads = len(operands.h_decoder), len(operands.b_heads)
    d_logits, d_means, d_log_stds = grads
    wide, narrow = operands.noise.dtype, plan.narrow

    def empty(*size: int, dtype: torch.dtype = wide) -> Tensor:
        return memory.empty(*size, like=operands.noise, dtype=dtype)

    def zeros(*size: int, dtype: torch.dtype = wide) -> Tensor:
        return operands.noise.new_zeros(size, dtype=dtype)

    if d_logits is None:
        canvas = torch.zeros_like(operands.images)
    else:
        canvas = d_logits.clone(memory_format=torch.contiguous_format)
    widths = (operands.w_encoder.shape[1], operands.w_decoder.shape[1])
    encoder, decoder = (zeros(examples, width, dtype=narrow) for width in widths)
    chunk = min(glimpses, -(-_CHUNK_ROWS // max(examples, 1)))
    gates = [empty(chunk, examples, 4 * hidden, dtype=narrow) for _ in range(2)]
    return Back(
        means=None if d_means is None else d_means.contiguous(),
        log_stds=None if d_log_stds is None else d_log_stds.contiguous(),
        canvas=canvas,
        heads=zeros(glimpses + 1, examples, heads),
        states=empty(examples, hidden),
        cells=(zeros(examples, hidden), zeros(examples, hidden)),
        inputs=(encoder, decoder),
        encoded=empty(examples, hidden, dtype=narrow),
        gates=(gates[0], gates[1]),
        posterior=empty(chunk, examples, 2 * latents, dtype=narrow),
    )


# The divergence
