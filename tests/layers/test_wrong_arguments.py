"""A matrix of layers, norms and wrong tensors: what torch's layer refuses, ours refuse too.

Where torch's own layer takes a wrong tensor, or dies of it, ours refuse it or give the numbers that
it stands for. Each example runs in a process that may die (`forked`), and none may.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from forked import STRIDED, example, outcomes, wrong_forms
from layer_results import CELLS, flat
from layer_results import LAYERS as RECURRENT
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ln_zoo.layers import LSTM, Conv2d, DRAWNetwork, Linear, LSTMCell, WindowLSTM, WindowState
from ln_zoo.norms import BatchNorm, LayerNorm, Norm, RMSNorm, WeightNorm

I, H, N, T = 3, 8, 2, 17  # noqa: E741
NORMS: dict[str, Norm | None] = {
    "none": None,
    "layer": LayerNorm(),
    "rms": RMSNorm(),
    "batch": BatchNorm(max_steps=4),
    "weight": WeightNorm(),
}
#: Each with what torch has in its place.
CLASSES: dict[type[nn.Module], type[nn.Module] | None] = {
    **{cls: getattr(nn, cls.__name__) for cls in (*RECURRENT, *CELLS, Linear, Conv2d)},
    **{WindowLSTM: None, DRAWNetwork: None},
}
#: Whether gradients are taken, in evaluation, without gradients, and after a right call: a cell
#: remembers what it found out about the last one.
MODES = ("train", "eval", "no gradients", "again")
KERNELS = ("1", "aten", "0")


class Call(NamedTuple):
    """A layer as a function of tensors by name, parameters among them, and right ones."""

    run: Callable[[dict[str, Tensor]], list[Tensor]]
    right: dict[str, Tensor]


def inputs_of(cls: type, packed: bool, steps: int) -> dict[str, Tensor]:
    if cls in RECURRENT:
        x = {"input": torch.randn(11, I), "batch_sizes": torch.tensor([3, 3, 2, 2, 1])}
        examples = 3 if packed else N
        states = {
            name: torch.randn(1, examples, H) for name in ("h", "c")[: 2 if cls is LSTM else 1]
        }
        return (x if packed else {"input": torch.randn(steps, N, I)}) | states
    if cls in CELLS:
        states = {name: torch.randn(N, H) for name in ("h", "c")[: 2 if cls is LSTMCell else 1]}
        return {"input": torch.randn(N, I), **states}
    if cls is Linear:
        return {"input": torch.randn(N, I)}
    if cls is Conv2d:
        return {"input": torch.randn(N, I, 5, 5)}
    if cls is WindowLSTM:
        state = {"h": (N, H), "c": (N, H), "kappa": (N, 2), "window": (N, 4)}
        return {
            **{"input": torch.randn(steps, N, I), "text": torch.rand(N, 6, 4)},
            **{name: torch.rand(*shape) for name, shape in state.items()},
        }
    return {"images": torch.rand(N, 6, 7), "noise": torch.randn(3, N, 4)}


def module_of(cls: type, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if cls is WindowLSTM:
        return WindowLSTM(I, H, 4, 2, **options)
    if cls is DRAWNetwork:
        return DRAWNetwork(6, 7, hidden_size=H, latent_size=4, **options)
    sizes = (I, H, 3) if cls in (Conv2d, nn.Conv2d) else (I, H)
    return cls(*sizes, **options)


def arguments_of(cls: type, tensors: dict[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if cls is DRAWNetwork:
        return (tensors["images"], tensors["noise"]), {}
    x: Any = tensors["input"]
    if "batch_sizes" in tensors:
        # Past the checks of its constructor, as from a file.
        x = PackedSequence.__base__.__new__(PackedSequence, x, tensors["batch_sizes"], None, None)
    if cls is WindowLSTM:
        return (x, tensors["text"], WindowState(*(tensors[k] for k in WindowState._fields))), {}
    states = [tensors[name] for name in ("h", "c") if name in tensors]
    hx = () if not states else (states[0] if len(states) == 1 else tuple(states),)
    return (x, *hx), {"step": 0} if cls in CELLS else {}


def call_of(
    cls: type, norm: Norm | None, packed: bool, mode: str, torchs: bool = False, steps: int = T
) -> Call:
    module = module_of(CLASSES[cls] if torchs else cls, **({} if torchs else {"norm": norm}))
    module.train(mode == "train")
    own = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    own = {name: a.detach() for name, a in own.items() if a.is_floating_point()}
    right = {**inputs_of(cls, packed, steps), **{f"self.{name}": a for name, a in own.items()}}
    for a in right.values():
        a.copy_(a.bfloat16())  # so that nothing is lost in another precision
    right = {name: a.clone() for name, a in right.items()}

    def replace(target: nn.Module, name: str, a: Tensor) -> None:
        *path, last = name.split(".")
        holder = functools.reduce(getattr, path, target)
        if last in holder._buffers:
            holder._buffers[last] = a.detach()
        else:
            holder._parameters[last] = nn.Parameter(a.detach())
        if hasattr(target, "_flat_weights"):
            target._flat_weights = [getattr(target, n, None) for n in target._flat_weights_names]

    def once(target: nn.Module, tensors: dict[str, Tensor]) -> list[Tensor]:
        arguments, options = arguments_of(cls, tensors)
        found = flat(target(*arguments, **({} if torchs else options)))
        if mode == "train":
            sum(a.sum() for a in found if a.requires_grad).backward()  # type: ignore[union-attr]
            found += [p.grad for p in target.parameters() if p.grad is not None]
        return [a.detach() for a in found]

    def run(tensors: dict[str, Tensor]) -> list[Tensor]:
        target = copy.deepcopy(module)
        with torch.set_grad_enabled(mode == "train"):
            if mode == "again":
                once(target, right)
            for name, a in tensors.items():
                if a is not right[name]:
                    replace(target, name.removeprefix("self."), a) if name in owned else None
            return once(target, tensors)

    owned = {f"self.{name}" for name in own}
    return Call(run, right)


def close(a: Tensor, b: Tensor) -> bool:
    """Whether numbers are the same, but for the rounding of gradients that are in bfloat16.

    They are added up over T steps, and each addition rounds by 2^-9 of what it has so far.
    """
    if a.numel() != b.numel():
        return False
    a, b = a.flatten(), b.double().flatten()
    if a.dtype == torch.bfloat16:
        largest = float(b.abs().max()) if b.numel() else 0.0
        rounding = {"rtol": 0.05, "atol": max(0.005, T * 2**-9 * largest)}
    else:
        rounding = {"rtol": 0.01, "atol": 0.001}
    return torch.allclose(a.double(), b, equal_nan=True, **rounding)


#: Forms in which a layer's input is a right one, of other sizes.
_LENGTH = ("long", "short", "one")
_BROADCAST = ("one", "fewer dimensions")
FREE: dict[type, dict[str, tuple[str, ...]]] = {
    **{cls: {"input": _LENGTH} for cls in RECURRENT},
    WindowLSTM: {"input": _LENGTH, "self.window.bias": _BROADCAST},
    **{cls: {} for cls in CELLS},
    Linear: {"input": (*_LENGTH, "rank", "empty"), "self.bias": _BROADCAST},
    Conv2d: {"input": (*_LENGTH, "empty", "narrow", "wide"), "self.weight": ("narrow",)},
    DRAWNetwork: {
        "noise": _LENGTH,
        **{f"self.{name}.bias": _BROADCAST for name in ("posterior", "read", "write", "patch")},
    },
}
#: Wrong numbers of examples at each step of packed data of 11 rows.
BATCH_SIZES = {
    "too many": [3, 3, 3, 3],
    "too few": [3, 3, 3],
    "growing": [1, 2, 3, 5],
    "growing late": [3, 2, 3, 3],
    "nothing first": [0, 11],
    "negative": [12, -1],
    "none": [],
}


def wrong(call: Call, cls: type) -> Iterator[tuple[str, str, Tensor]]:
    """Names of tensors, wrong forms and what they are."""
    for name, a in call.right.items():
        for form, b in wrong_forms(a).items():
            if form not in FREE[cls].get(name, ()):
                yield name, form, b
    if "batch_sizes" in call.right:
        for form, sizes in BATCH_SIZES.items():
            yield "batch_sizes", form, torch.tensor(sizes, dtype=torch.int64)


def examples_of(call: Call, keys: list[tuple[str, str, Tensor]]) -> list[Callable[[], str]]:
    expected = call.run(call.right)
    runs = [functools.partial(call.run, {**call.right, name: form}) for name, _, form in keys]
    return [example(run, expected, close) for run in runs]


def matrix(
    cls: type, norm: str, packed: bool, mode: str, kernels: str
) -> dict[tuple[str, str], str]:
    """Outcomes by the name of the tensor and its wrong form."""
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ, LN_ZOO_KERNELS=kernels):
        # Kernels need more steps than the loop.
        call = call_of(cls, NORMS[norm], packed, mode, steps=3 if kernels == "0" else T)
        keys = list(wrong(call, cls))
        found = outcomes(examples_of(call, keys), together=True)
    return {(name, form): word for (name, form, _), word in zip(keys, found, strict=True)}


@functools.cache
def of_torch(cls: type, packed: bool, mode: str, parameters: bool) -> dict[tuple[str, str], str]:
    """The same of torch's own layer; some wrong parameters are the death of it, or of later ones.

    Each example therefore has a process of its own, if parameters are among them.
    """
    if CLASSES[cls] is None:
        return {}
    call = call_of(cls, None, packed, mode, torchs=True)
    keys = [key for key in wrong(call, cls) if parameters or not key[0].startswith("self.")]
    found = outcomes(examples_of(call, keys), together=not parameters)
    return {(name, form): word for (name, form, _), word in zip(keys, found, strict=True)}


#: Forms that have a tensor's numbers.
CONVERTED = (STRIDED, "float64", "bfloat16")


def bad(found: dict[tuple[str, str], str], torchs: dict[tuple[str, str], str]) -> dict[Any, Any]:
    """What died, gave wrong numbers, or was taken where torch refuses it.

    Right numbers will do in another precision, where ours convert a bias, and with other strides,
    where torch misreads ``batch_sizes``. Running averages that are kept in bfloat16 are rounded
    whenever they move, and a step of one example is normalised by them.
    """
    rounded = {
        (name, form)
        for name, form in found
        if form == "bfloat16" and name.endswith(("running_mean", "running_var"))
    }
    return {
        key: (word, torchs.get(key))
        for key, word in found.items()
        if not word.startswith("raised")
        and not (key in rounded and word == "other")
        and (
            word != "same" or (key[1] not in CONVERTED and torchs.get(key, "").startswith("raised"))
        )
    }


def cells_of_matrix() -> list[tuple[type, str, bool, str, str]]:
    """Layers, packed or not; norms, modes and kernels in turn."""
    pairs = [(cls, packed) for cls in CLASSES for packed in {False, cls in RECURRENT}]
    # DRAW takes seconds; `test_wrong_operands` has the tensors of its kernels.
    pairs.remove((DRAWNetwork, False))
    norms = ("layer", "batch", "rms", "weight", "none")
    return [
        (cls, norms[i % 5], packed, MODES[i % 4], KERNELS[i % 3])
        for i, (cls, packed) in enumerate(pairs)
    ]


def named(cell: tuple[type, str, bool, str, str]) -> str:
    cls, norm, packed, *rest = cell
    return "-".join([cls.__name__, norm, "packed" if packed else "padded", *rest])


@pytest.mark.parametrize("cell", cells_of_matrix(), ids=named)
def test_wrong_tensors_are_refused_where_torch_does(cell: Any) -> None:
    cls, norm, packed, mode, kernels = cell
    found = matrix(cls, norm, packed, mode, kernels)
    assert not bad(found, of_torch(cls, packed, "eval", parameters=False))


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cls", CLASSES)
def test_the_whole_matrix(cls: type, norm: str) -> None:
    packings = (False, True) if cls in RECURRENT else (False,)
    for packed, mode, kernels in itertools.product(packings, MODES, KERNELS):
        found = matrix(cls, norm, packed, mode, kernels)
        torchs = of_torch(cls, packed, "eval" if mode == "again" else mode, parameters=True)
        assert not bad(found, torchs), (packed, mode, kernels)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cls", RECURRENT)
def test_steps_of_no_example_at_the_end_are_none(cls: type, norm: str) -> None:
    layer, x = cls(I, H, norm=NORMS[norm], bidirectional=True).eval(), torch.randn(6, I)
    found, _ = layer(PackedSequence(x, torch.tensor([4, 2, 0])))
    expected, _ = layer(PackedSequence(x, torch.tensor([4, 2])))
    assert torch.equal(found.data, expected.data)


@pytest.mark.parametrize("name", ["sorted_indices", "unsorted_indices"])
@pytest.mark.parametrize("cls", RECURRENT)
def test_orders_of_packed_data_that_do_not_fit(cls: type, name: str) -> None:
    layer, h = cls(I, H, norm=LayerNorm()), torch.randn(1, 3, H)
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, I) for n in (3, 2, 1)])
    right = {"sorted_indices": torch.arange(3), "unsorted_indices": torch.arange(3)}
    hx = (h, h) if cls is LSTM else h

    def run(order: Tensor) -> Callable[[], str]:
        both = (right | {name: order}).values()
        given = PackedSequence.__base__.__new__(PackedSequence, *packed[:2], *both)
        return lambda: str(layer(given, hx)[0].data.shape)

    orders = [torch.arange(3, device="meta"), torch.tensor([0, 1, 7]), torch.tensor([0, -4, 1])]
    if name == "sorted_indices":
        orders += [torch.arange(2), torch.arange(4)]
    assert all(word.startswith("raised") for word in outcomes([run(order) for order in orders]))


@pytest.mark.parametrize("norm", ["none", "layer", "rms", "weight"])
@pytest.mark.parametrize("cls", RECURRENT)
def test_sizes_of_zero_are_torchs(cls: type, norm: str) -> None:
    """Of time and of the batch; torch's constructors refuse layers of no units."""
    torchs, ours = CLASSES[cls](I, H), cls(I, H, norm=NORMS[norm])  # type: ignore[misc]
    for shape in ((0, 2, I), (5, 0, I), (0, I)):
        expected = outcome(torchs, torch.randn(shape))
        assert outcome(ours, torch.randn(shape)) == expected
    with pytest.raises(ValueError, match="hidden_size must be greater than zero"):
        cls(I, 0, norm=NORMS[norm])


@pytest.mark.parametrize("norm", ["none", "layer", "rms", "weight"])
@pytest.mark.parametrize("cls", CELLS)
@pytest.mark.parametrize("gradients", [True, False])
def test_cells_of_no_examples_or_no_inputs(cls: type, norm: str, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        for examples, inputs in ((0, I), (2, 0), (0, 0)):
            torchs, ours = CLASSES[cls](inputs, H), cls(inputs, H, norm=NORMS[norm])  # type: ignore[misc]
            for _ in range(2):
                x = torch.randn(examples, inputs)
                assert outcome(ours, x) == outcome(torchs, x)


def outcome(layer: nn.Module, x: Tensor) -> Any:
    try:
        return [tuple(a.shape) for a in flat(layer(x))]
    except (RuntimeError, ValueError) as error:
        return str(error)
