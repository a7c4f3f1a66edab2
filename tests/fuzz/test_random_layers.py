"""Random layers against the unrolled float64 reference, cold, warm and changed between calls."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast
from unittest import mock

import pytest

pytest.importorskip("hypothesis", reason="needs hypothesis: pip install 'ln-zoo[test]'")

import torch
from accuracy import assert_as_accurate, generic_loop, moved
from campaign import campaign, fast
from hypothesis import example, given
from layer_cases import PEEPHOLE, Case, cases, cell_called
from layer_results import gradients, randomised
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from unrolled import unrolled

from ln_zoo import ops
from ln_zoo.layers import RecurrentLayer
from ln_zoo.norms import BatchNorm, LayerNorm, WeightNorm

#: Runs of the generic loop that a case gets before it fails. Among thousands of cases some have
#: results of a few numbers, of which four runs may all be more exact than usual.
RUNS = 64
RUNS_APART = 1000  # seeds of the parameters of a run

DTYPES = {"autocast": torch.float32} | {
    str(a).removeprefix("torch."): a
    for a in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


def built(case: Case) -> RecurrentLayer:
    layer = RecurrentLayer(
        case.inputs,
        case.hidden,
        case.layers,
        case.bias,
        case.batch_first,
        0.0,
        case.bidirectional,
        case.projection,
        dtype=DTYPES[case.precision],
        norm=case.norm,
        normalize=case.normalize,
        zoneout=case.zoneout or 0.0,
        recurrent_dropout=case.recurrent_dropout,
        weight_dropout=case.weight_dropout,
        blocks=case.blocks,
        recompute=case.recompute,
        cell=cell_called(case.cell, case.bias),
    )
    randomised(layer, 0.1)
    for name, buffer in layer.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    return layer.train(case.training)


# Changes between calls


def some_parameter(layer: nn.Module) -> tuple[str, nn.Parameter]:
    named = sorted(layer.named_parameters())
    return named[int(torch.randint(len(named), ()))]


def edit_data(layer: Any) -> Any:
    some_parameter(layer)[1].data.mul_(1.25)
    return layer


def swap_data(layer: Any) -> Any:
    _, parameter = some_parameter(layer)
    shape, strided = parameter.shape, parameter.data.new_empty(*parameter.shape[::-1], 2)
    strided[..., 0].copy_(parameter.data.permute(*range(parameter.dim())[::-1]).neg())
    parameter.data = strided[..., 0].permute(*range(len(shape))[::-1])
    return layer


def replace_parameter(layer: Any) -> Any:
    name, parameter = some_parameter(layer)
    owner, _, key = name.rpartition(".")
    new = nn.Parameter(parameter.detach() + 0.1, parameter.requires_grad)
    setattr(layer.get_submodule(owner), key, new)
    return layer


def freeze(layer: Any) -> Any:
    _, parameter = some_parameter(layer)
    parameter.requires_grad_(not parameter.requires_grad)
    return layer


def pickled(layer: Any) -> Any:
    return pickle.loads(pickle.dumps(layer))


def saved(layer: Any) -> Any:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)
    return other


def shallow(layer: Any) -> Any:
    """A copy with other noise, used after the original and before it."""
    other = copy.copy(layer)
    other.zoneout = tuple(0.5 - p / 2 for p in layer.zoneout)
    return other


def applied(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Not under parametrisations, as torch has it: no pickle, and after `_apply` no copy."""

    def unless_parametrized(layer: Any) -> Any:
        computed = any(parametrize.is_parametrized(part) for part in layer.modules())
        return layer if computed else change(layer)

    return unless_parametrized


def scaled(layer: Any) -> Any:
    """Every recurrent weight parametrised; done twice, it is taken off again."""
    for suffix in layer.sites:
        name = f"weight_hh_{suffix}"
        if parametrize.is_parametrized(layer, name):
            parametrize.remove_parametrizations(layer, name)
        else:
            parametrize.register_parametrization(layer, name, nn.Softsign())
    return layer


def sgd_step(layer: Any) -> Any:
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter -= 0.1 * torch.randn_like(parameter)
    return layer


def inference(layer: Any) -> Any:
    """A call in inference mode, from which nothing may be kept that training cannot use."""
    with torch.inference_mode():
        width = layer.input_size
        layer(torch.randn(3, 2, width, dtype=layer.weight_ih_l0.dtype))
    return layer


CHANGES: dict[str, Callable[[Any], Any]] = {
    "edit data": edit_data,
    "swap data": swap_data,
    "replace parameter": replace_parameter,
    "freeze": freeze,
    "deepcopy": copy.deepcopy,
    "pickle": applied(pickled),
    "state dict": saved,
    "shallow copy": applied(shallow),
    "to half": applied(lambda layer: layer.half().to(layer.fuzzed_dtype)),
    "to double": applied(lambda layer: layer.double().to(layer.fuzzed_dtype)),
    "parametrize": scaled,
    "step": sgd_step,
    "inference": inference,
    "train": lambda layer: layer.train(),
    "eval": lambda layer: layer.eval(),
    "share": applied(lambda layer: layer.share_memory()),
}


# One call


def nudged(a: Tensor, run: int, case: Case) -> Tensor:
    """`moved`, by the last bit of the precision of products."""
    kind = torch.bfloat16 if case.precision == "autocast" else a.dtype
    return cast(Tensor, moved(a, run, kind))


def in_memory(x: Tensor, kind: str) -> Tensor:
    """Equal numbers, elsewhere in memory."""
    if kind == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "strided":
        return torch.stack([x, x + 1], -1)[..., 0]
    if kind == "expanded":
        return x[:1].expand_as(x)
    if kind == "offset":
        return torch.cat([x.new_ones(3), x.flatten()])[3:].view_as(x)
    return torch._neg_view(-x) if kind == "negated" else x


class Call:
    """Inputs of one call, and the results of any layer on them."""

    def __init__(self, layer: Any, case: Case, number: int) -> None:
        self.case, self.seed = case, case.seed + number
        torch.manual_seed(self.seed)
        dtype = layer.weight_ih_l0.dtype
        steps, count = max(case.lengths), len(case.lengths)
        lengths = torch.tensor(case.lengths)
        self.lengths = lengths
        x = torch.randn(steps, count, case.inputs).to(dtype)
        self.x = in_memory(x, "contiguous") if case.memory != "expanded" else x[:1].expand_as(x)
        runs = layer.num_layers * (2 if case.bidirectional else 1)
        widths = [case.hidden] * len(layer.cell.states)
        widths[0] = case.projection or case.hidden
        self.states = [torch.randn(runs, count, width).to(dtype) for width in widths]
        if "n" in layer.cell.states:  # a sum of weights
            self.states[2] = 0.5 + self.states[2].abs()
        if not case.given_states:
            self.states = [torch.zeros_like(s) for s in self.states]
        self.reset = torch.rand(steps, count) < case.resets

    def run(self, layer: Any, number: int = 0) -> dict[str, Tensor]:
        """Outputs, states, running averages and gradients, by name; inputs `moved`."""
        case = self.case
        x = nudged(self.x, number, case).clone().requires_grad_()
        states = [nudged(s, number, case).clone().requires_grad_() for s in self.states]
        torch.manual_seed(self.seed)
        half = torch.autocast("cpu", torch.bfloat16)
        with half if case.precision == "autocast" else nullcontext():
            output, final = self._called(layer, x, states)
        return self._results(layer, x, states, output, final)

    def _called(self, layer: Any, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        case, lengths = self.case, self.lengths
        first = layer.batch_first
        shown, reset = in_memory(x, case.memory), self.reset
        given: Any = tuple(states)
        if case.layout == "unbatched":
            shown, reset = shown.squeeze(1), reset.squeeze(1)
            given = tuple(s.squeeze(1) for s in given)
        elif first:
            shown, reset = shown.transpose(0, 1), reset.transpose(0, 1)
        options: dict[str, Any] = {}
        if case.layout in ("packed", "unsorted"):
            sort = case.layout == "packed"
            shown, reset = (
                pack_padded_sequence(a, lengths, first, enforce_sorted=sort) for a in (shown, reset)
            )
        elif case.layout == "mask":
            mask = torch.arange(len(x)).unsqueeze(1) < lengths
            options["mask"] = mask.t() if first else mask
        if case.resets:
            options["reset"] = reset
        hx = None if not case.given_states else given if len(given) > 1 else given[0]
        output, final = layer(shown, hx, **options)
        final = [final] if isinstance(final, Tensor) else list(final)
        if isinstance(output, PackedSequence):
            output = pad_packed_sequence(output, first)[0]
        if case.layout == "unbatched":
            output, final = output.unsqueeze(1), [s.unsqueeze(1) for s in final]
        elif first:
            output = output.transpose(0, 1)
        return output, final

    def _results(
        self, layer: Any, x: Tensor, states: list[Tensor], output: Tensor, final: list[Tensor]
    ) -> dict[str, Tensor]:
        results = dict(zip(("output", *layer.cell.states), (output, *final), strict=True))
        sources = {"x": x} | {n: p for n, p in layer.named_parameters() if p.requires_grad}
        if self.case.given_states:
            sources |= {f"initial {n}": s for n, s in zip(layer.cell.states, states, strict=True)}
        pairs = zip(sources, gradients(tuple(results.values()), sources.values()), strict=True)
        found = {name: a.detach() for name, a in results.items()}
        found |= {f"d {name}": g for name, g in pairs}
        return found | {n: b.clone() for n, b in layer.named_buffers() if "running" in n}

    def exact(self, layer: Any, noise: list[Any], weight_masks: list[Tensor]) -> dict[str, Tensor]:
        x = self.x.double().clone().requires_grad_()
        states = [s.double().clone().requires_grad_() for s in self.states]
        drawn = [self._in_order(n) for n in noise]
        masks = [mask.double() for mask in weight_masks]
        shown = in_memory(x, self.case.memory)
        output, final = unrolled(layer, shown, self.lengths, states, self.reset, drawn, masks)
        return self._results(layer, x, states, output, final)

    def _in_order(self, noise: Any) -> Any:
        """Noise of packed rows by step and example, in the order of the examples."""
        if self.case.layout not in ("packed", "unsorted", "mask"):
            return noise
        rows = torch.zeros(len(self.x), len(self.lengths))
        packed = pack_padded_sequence(rows, self.lengths, enforce_sorted=False)

        def padded(a: Any) -> Any:
            return pad_packed_sequence(packed._replace(data=a))[0] if isinstance(a, Tensor) else a

        dropout = noise.dropout
        if dropout is not None:
            dropout = dropout[packed.unsorted_indices]
        return noise._replace(dropout=dropout, zoneout=tuple(map(padded, noise.zoneout)))


def check(case: Case) -> None:
    """Two calls of the layer as built, and after each change."""
    torch.manual_seed(case.seed)
    layer: Any = built(case)
    layer.fuzzed_dtype = layer.weight_ih_l0.dtype
    for number, change in enumerate(("as built", *case.changes)):
        changed = layer if number == 0 else CHANGES[change](layer)
        for k in range(2):
            compare(changed, case, 10 * number + k)
        if change == "shallow copy":
            compare(layer, case, 10 * number + 2)
        layer = changed


def compare(layer: Any, case: Case, number: int) -> None:
    call = Call(layer, case, number)
    before = copy.deepcopy(layer)
    noise: list[Any] = []
    weight_masks: list[Tensor] = []
    draw, mask = ops.draw_noise, ops.dropout_mask

    def drawn(*arguments: Any) -> Any:
        noise[:] = draw(*arguments)
        return noise

    def masked(*arguments: Any) -> Tensor:
        weight_masks.append(mask(*arguments))
        return weight_masks[-1]

    with mock.patch.multiple(ops, draw_noise=drawn, dropout_mask=masked):
        found = call.run(layer)
    exact = call.exact(copy.deepcopy(before).double(), noise, weight_masks)

    gradients = {name: a.norm() for name, a in exact.items() if name.startswith("d ")}
    largest = max(gradients.values())
    # A norm over one unit: every gradient may be a sum with a term that is zero but for rounding.
    constant = case.hidden == 1 and hasattr(case.norm, "eps")
    if constant or not largest:  # what cancels is the upstream gradient over a deviation
        largest = torch.tensor(getattr(case.norm, "eps", 1.0) ** -0.5)

    def comparable(results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients that are zero but for rounding are measured against the largest."""
        zero = [name for name, norm in gradients.items() if constant or norm < 1e-12 * largest]
        return results | {name: results[name].double() + largest for name in zero}

    def loop(run: int) -> dict[str, Tensor]:
        other = copy.deepcopy(before)
        with torch.no_grad():
            for k, parameter in enumerate(other.parameters()):
                parameter.copy_(nudged(parameter, run and run * RUNS_APART + k, case))
        with generic_loop():
            return comparable(call.run(other, run))

    assert_as_accurate(comparable(found), comparable(exact), loop, runs=RUNS, loop_in_double=True)


@given(case=cases(list(CHANGES)))
@example(Case("Dreamer's GRU", bias=False, precision="bfloat16", layout="packed", lengths=(5, 3)))
@example(Case("GRU", LayerNorm(), zoneout=(0.5,), training=False, changes=("shallow copy",)))
@example(Case("LSTM", LayerNorm(), inputs=1, hidden=1, lengths=(1,), precision="float64"))
@example(Case("GRU", BatchNorm(max_steps=1), memory="negated", inputs=16, training=False))
@example(Case("GRU", inputs=4, hidden=4, lengths=(1,), precision="autocast", training=False))
@example(Case("GRU", LayerNorm(), inputs=1, hidden=1, bias=False, lengths=(1,), given_states=True))
@example(Case("GRU", LayerNorm(), inputs=1, hidden=1, bias=False, lengths=(1,), training=False))
@example(Case("LSTM", WeightNorm(), inputs=1, hidden=1, layers=2, precision="float64"))
@example(Case(PEEPHOLE, BatchNorm(max_steps=2), layout="unsorted", lengths=(2, 4), layers=2))
@example(Case("GRU", WeightNorm(), hidden=6, blocks=3, lengths=(17,), weight_dropout=0.5))
@fast(50)
def test_random_layers(case: Case) -> None:
    check(case)


@pytest.mark.slow
def test_random_layers_for_long() -> None:
    campaign(cases(list(CHANGES)), check)
