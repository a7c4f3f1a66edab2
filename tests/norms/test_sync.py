"""Batch norm in two processes: statistics of each for itself, or of both together."""

from __future__ import annotations

import datetime
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, Linear
from ln_zoo.norms import BatchNorm, batch_statistics, population_statistics

F64 = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
#: Seconds after which processes that wait for each other are taken for hung.
PATIENCE = 120
JOINT = BatchNorm(sync=True, max_steps=4)
APART = replace(JOINT, sync=False)


class Recurrent(nn.Module):
    """A recurrent layer of two layers and a readout, all normalised, in float64."""

    def __init__(self, cls: type, norm: BatchNorm) -> None:
        super().__init__()
        self.layer = cls(3, 4, num_layers=2, norm=norm, dtype=F64)
        self.readout = Linear(4, 2, norm=norm, dtype=F64)

    def forward(self, x: Tensor | PackedSequence) -> Tensor:
        output, states = self.layer(x)
        last = states[0] if isinstance(states, tuple) else states
        data = output.data if isinstance(output, PackedSequence) else output.flatten(0, 1)
        # Of packed examples the first belong to the first process: no two rows are alike.
        return self.readout(torch.cat([data, last[-1]]))


def models(norm: BatchNorm) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    gains = replace(norm, gain=0.7, recurrent_gain=0.4)
    return {
        "linear": nn.Sequential(
            Linear(3, 4, norm=gains, dtype=F64), nn.Tanh(), Linear(4, 2, norm=gains, dtype=F64)
        ),
        "conv": Conv2d(3, 2, 2, norm=gains, dtype=F64),
        "lstm": Recurrent(LSTM, gains),
        "gru": Recurrent(GRU, gains),
        "rnn": Recurrent(RNN, gains),
        "packed": Recurrent(LSTM, gains),
    }


def examples(name: str, seed: int) -> list[Tensor]:
    """Eight examples of six steps, of which packed ones end earlier."""
    torch.manual_seed(seed)
    shape = {"linear": (3,), "conv": (3, 4, 5)}.get(name, (6, 3))
    found = [1 + torch.randn(shape, dtype=F64) for _ in range(8)]
    if name == "packed":
        # Both processes have six steps; the last two are reached by one example of either.
        lengths = (6, 4, 4, 2, 1, 6, 3, 2)
        found = [example[:n] for example, n in zip(found, lengths, strict=True)]
    return found


def batch(name: str, chosen: list[Tensor]) -> Tensor | PackedSequence:
    if name == "packed":
        return pack_sequence(chosen, enforce_sorted=False)
    return torch.stack(chosen, dim=0 if name in ("linear", "conv") else 1)


#: Of eight examples the first five are the first process's.
SHARES = (slice(0, 5), slice(5, 8))


def loss_of(output: Tensor) -> Tensor:
    """A sum over examples, so that those of the processes add up to that of all."""
    features = output if output.dim() == 2 else output.movedim(1, -1)
    return (features.sin() * torch.linspace(-1, 1, output.shape[1], dtype=F64)).sum()


def train(model: nn.Module, name: str, share: slice, steps: int = 3) -> dict[str, Any]:
    """A few updates; what came out of the last, and what the model has become."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        output = model(batch(name, examples(name, step)[share]))
        loss_of(output).backward()
        grads = {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters()}
        before = {n.removeprefix("module."): b.clone() for n, b in model.named_buffers()}
        optimizer.step()
    return {"output": output.detach(), "grads": grads, "buffers": before}


def equals_one(rank: int) -> Any:
    found = {}
    for unbiased in (False, True):
        for name, model in models(replace(JOINT, unbiased=unbiased)).items():
            found[name, unbiased] = train(DistributedDataParallel(model), name, SHARES[rank])
    return found


def each_for_itself(rank: int) -> Any:
    found = {}
    for name, model in models(APART).items():
        output = DistributedDataParallel(model)(batch(name, examples(name, 0)[SHARES[rank]]))
        found[name] = output.detach(), dict(model.named_buffers())
    return found


def gradients_of_gradients(rank: int) -> Any:
    model = models(JOINT)["linear"]
    x = batch("linear", examples("linear", 0)[SHARES[rank]]).requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
    found = torch.autograd.grad(slope.square().sum(), list(model.parameters()))
    for grad in found:
        distributed.all_reduce(grad)
    return slope.detach(), found


def few_examples(rank: int) -> Any:
    """One example each; none in the second; one in all."""
    found: dict[str, Any] = {}
    for unbiased in (False, True):
        for name, sizes in {"one each": (1, 1), "none": (4, 0)}.items():
            model = models(replace(JOINT, unbiased=unbiased))["linear"]
            start = (0, sizes[0])[rank]
            share = torch.stack(examples("linear", 0))[start : start + sizes[rank]]
            output = model(share)
            loss_of(output).backward()
            grads = [p.grad for p in model.parameters()]
            for grad in grads:
                distributed.all_reduce(grad)
            found[name, unbiased] = output.detach(), grads, dict(model.named_buffers())
    try:
        models(JOINT)["linear"](torch.ones(1 - rank, 3, dtype=F64))
    except ValueError as error:
        found["one"] = str(error)
    return found


def different_lengths(rank: int) -> Any:
    messages = []
    for cls in (LSTM, GRU, RNN):
        layer = cls(3, 4, norm=JOINT, dtype=F64)
        for x in (
            torch.randn(5 + 2 * rank, 4, 3, dtype=F64),
            pack_sequence([torch.randn(n + rank, 3, dtype=F64) for n in (4, 2)]),
        ):
            try:
                layer(x)
            except ValueError as error:
                messages.append(str(error))
    # Nothing is exchanged in evaluation, where lengths and numbers of batches may differ; nor
    # where batches are measured.
    layer.eval()
    for _ in range(1 + rank):
        layer(torch.randn(5 + 2 * rank, 4, 3, dtype=F64))
        with batch_statistics(layer):
            layer(torch.randn(5 + 2 * rank, 4, 3, dtype=F64))
    return messages


def described(rank: int) -> Any:
    """Whether kernels could run the site: in training, measuring, evaluation."""
    found = []
    for norm in (JOINT, APART):
        site = LSTM(3, 4, norm=norm).sites["l0"]["cell"]
        found.append(site.to_spec() is not None)
        with batch_statistics(site):
            found.append(site.to_spec() is not None)
        found.append(site.eval().to_spec() is not None)
    return found


#: Batches of whole-set statistics by process: other numbers, other lengths.
SETS = {
    "more in the first": ([(5, 6), (4, 6), (3, 2)], [(4, 3)]),
    "none in the second": ([(5, 3), (4, 6)], []),
    "longest in the second": ([(5, 2), (2, 2)], [(4, 7)]),
}


def whole_set(kind: str, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(steps, size, 3, dtype=F64, generator=generator)
        for size, steps in SETS[kind][rank]
    ]


def populations(rank: int) -> Any:
    found = {}
    for norm in (JOINT, APART):
        for method in ("average", "total_variance"):
            for kind in SETS:
                model = models(norm)["lstm"].eval()
                # A site that nothing goes through, in neither process.
                model.add_module("spare", Linear(2, 2, norm=norm))
                with population_statistics(model, method):
                    for x in whole_set(kind, rank):
                        model(x)
                buffers = {n: b.clone() for n, b in model.named_buffers()}
                found[norm.sync, method, kind] = buffers
    return found


SCENES: dict[str, Callable[[int], Any]] = {
    scene.__name__: scene
    for scene in (
        equals_one, each_for_itself, gradients_of_gradients, few_examples, different_lengths,
        described, populations,
    )
}  # fmt: skip


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=PATIENCE / 2),
    )
    found = {}
    for name, scene in SCENES.items():
        try:
            found[name] = scene(rank)
        except Exception:
            found[name] = traceback.format_exc()
            break  # the processes may be at different places now
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """What a scene gave in each of the two processes."""
    folder = tmp_path_factory.mktemp("two")
    # Forked, they need not import torch and Lightning anew, which takes longer than all of their
    # work. Threads of autograd, which a GPU has, are no more in a fork.
    forks = sys.platform == "linux" and not torch.cuda.is_available()
    processes = multiprocessing.start_processes(
        work, (str(folder),), nprocs=2, join=False, start_method="fork" if forks else "spawn"
    )
    deadline = time.monotonic() + PATIENCE
    while not processes.join(max(0, deadline - time.monotonic())):  # returns when one has ended
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            pytest.fail("the processes wait for each other")
    found = [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(2)]

    def of(scene: str) -> list[Any]:
        for rank, of_rank in enumerate(found):
            assert scene in of_rank, f"process {rank} failed before: {of_rank}"
            assert not isinstance(of_rank[scene], str), f"process {rank}: {of_rank[scene]}"
        return [of_rank[scene] for of_rank in found]

    return of


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, **CLOSE)


def in_order(name: str, outputs: list[Tensor], whole: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the two processes, and those of one process, sorted: their order is their own."""
    rows = torch.cat(outputs)
    return (rows[rows[:, 0].argsort()], whole[whole[:, 0].argsort()])


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("name", list(models(APART)))
def test_together_two_processes_are_one(two, name: str, unbiased: bool) -> None:
    found = [of_rank[name, unbiased] for of_rank in two("equals_one")]
    model = models(replace(JOINT, unbiased=unbiased))[name]
    # DDP takes the mean of the gradients where the losses would add up.
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / 2)
    expected = train(model, name, slice(None))
    outputs = [of_rank["output"] for of_rank in found]
    if name == "conv":
        close(torch.cat(outputs), expected["output"])
    else:
        close(*in_order(name, outputs, expected["output"]))
    for of_rank in found:
        close(of_rank["grads"], expected["grads"])
        close(of_rank["buffers"], expected["buffers"])
    for key, value in found[0]["buffers"].items():
        assert torch.equal(value, found[1]["buffers"][key]), key  # to the last bit


@pytest.mark.parametrize("name", list(models(APART)))
def test_apart_each_has_its_own(two, name: str) -> None:
    buffers = []
    for share, of_rank in zip(SHARES, two("each_for_itself"), strict=True):
        output, own = of_rank[name]
        model = models(APART)[name]
        close(output, model(batch(name, examples(name, 0)[share])).detach())
        close(own, dict(model.named_buffers()))
        buffers.append(torch.cat([a.double().flatten() for a in own.values()]))
    assert not torch.allclose(*buffers)


def test_gradients_of_gradients(two) -> None:
    found = two("gradients_of_gradients")
    model = models(APART)["linear"]
    x = batch("linear", examples("linear", 0)).requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
    expected = torch.autograd.grad(slope.square().sum(), list(model.parameters()))
    close(torch.cat([of_rank[0] for of_rank in found]), slope.detach())
    for _, grads in found:
        close(grads, expected)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(("name", "number"), [("one each", 2), ("none", 4)])
def test_few_examples(two, name: str, number: int, unbiased: bool) -> None:
    found = [of_rank[name, unbiased] for of_rank in two("few_examples")]
    model = models(replace(APART, unbiased=unbiased))["linear"]
    output = model(batch("linear", examples("linear", 0)[:number]))
    loss_of(output).backward()
    close(torch.cat([of_rank[0] for of_rank in found]), output.detach())
    for _, grads, buffers in found:
        close(grads, [p.grad for p in model.parameters()])
        close(buffers, dict(model.named_buffers()))


def test_one_example_in_all_is_no_batch(two) -> None:
    for of_rank in two("few_examples"):
        assert "at least 2 examples per feature in training, got 1" in of_rank["one"]


def test_different_lengths_are_told_by_both_before_they_wait(two) -> None:
    first, second = two("different_lengths")
    assert first == second
    assert len(first) == 6
    for message, lengths in zip(first, ["5 to 7", "4 to 5"] * 3, strict=True):
        assert lengths in message


def test_kernels_run_whatever_needs_no_exchange(two) -> None:
    for of_rank in two("described"):
        assert of_rank == [False, True, True, True, True, True]


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("kind", list(SETS))
@pytest.mark.parametrize("method", ["average", "total_variance"])
def test_population_statistics_of_two_are_those_of_one(
    two, method: str, kind: str, across: bool
) -> None:
    model = models(APART)["lstm"].eval()
    model.add_module("spare", Linear(2, 2, norm=APART))
    with population_statistics(model, method):
        for rank in range(2):
            for x in whole_set(kind, rank):
                model(x)
    expected = dict(model.named_buffers())
    for of_rank in two("populations"):
        close(of_rank[across, method, kind], expected)


def test_one_process_is_as_without() -> None:
    layers = [models(norm)["lstm"] for norm in (JOINT, APART)]
    x = batch("lstm", examples("lstm", 0))
    close(*(layer(x) for layer in layers))
    close(*(dict(layer.named_buffers()) for layer in layers))
    assert layers[0].layer.sites["l0"]["cell"].to_spec() is not None
