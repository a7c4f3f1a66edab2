"""Trained models for `ln-zoo analyze dynamics`, and the same models before training."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.analysis import Dynamics, network_dynamics
from ln_zoo.analysis.stepping import drawing
from ln_zoo.cli.stored import load_model
from ln_zoo.models import Handwriting, SequenceClassifier
from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Site, keeps_statistics, population_statistics

#: Images by the numbers that a model reads of each.
_IMAGES = {784: "MNIST", 64: "Digits"}


class _Task(NamedTuple):
    """What a model reads, and its loss.

    Attributes:
        batch: what the loss is given beside the model.
        loss: a scalar, of model and batch.
        said: the examples in words.
        first: number of the first layer that is measured, counted from 1.
    """

    batch: tuple[Any, ...]
    loss: Callable[[Any, Any], Tensor]
    said: str
    first: int = 1


def trained_dynamics(arguments: argparse.Namespace) -> tuple[list[Dynamics], str]:
    """Of each model's layers, before and after training; and what was read, in words.

    Args:
        arguments: of the command.

    Raises:
        ValueError: for a model of another kind, or one that cannot be measured.
    """
    found: list[Dynamics] = []
    titles: dict[str, None] = {}
    for given in (*arguments.weights, *arguments.ckpt):
        model = load_model(given)
        if isinstance(model, SequenceClassifier):
            task = _images(arguments, model.double())
        elif isinstance(model, Handwriting):
            task = _lines(arguments, model.double())
        else:
            raise ValueError(
                f"{given} is a {type(model).__name__}; the dynamics of a SequenceClassifier and of "
                "a Handwriting model can be measured"
            )
        for when, network in (
            ("untrained", _before_training(model, task, arguments.seed)),
            ("trained", model),
        ):
            layers = network_dynamics(
                network,
                task.batch,
                task.loss,
                steps=arguments.steps,
                count=arguments.exponents,
                skip=arguments.skip,
                statistics=arguments.statistics,
                seed=arguments.seed,
            )
            several = len(layers) > 1 or task.first > 1
            for number, layer in enumerate(layers.values(), task.first):
                what = f"layer {number}, {when}" if several else when
                name = f"{Path(given).name} {what}"
                found.append(dataclasses.replace(layer, group="", name=name))
        titles[f"{task.said}, {len(found[-1].growth)} steps"] = None
    return found, "; ".join(titles)


def _before_training(model: ZooModule, task: _Task, seed: int) -> ZooModule:
    """A model as this one may have been at its start, but for what it took from its data.

    Statistics of batch norm are those of the task's examples.
    """
    init_args = {k: v for k, v in model.hparams.items() if not k.startswith("_")}
    taken = {
        f"{place}.{name}".removeprefix("."): buffer
        for place, module in model.named_modules()
        if not isinstance(module, Site)
        for name, buffer in module.named_buffers(recurse=False)
    }
    with drawing(seed):
        fresh = type(model)(**init_args).double().eval()
        fresh.load_state_dict(taken, strict=False)
        if keeps_statistics(fresh):
            with population_statistics(fresh):
                task.loss(fresh, task.batch)
    return fresh


def _images(arguments: argparse.Namespace, model: SequenceClassifier) -> _Task:
    """The first test images and their labels."""
    from ln_zoo import data

    kind = _IMAGES.get(model.in_features)
    if kind is None:
        raise ValueError(
            f"this model reads {model.in_features} numbers an example; there are images of "
            f"{' and '.join(f'{size} ({name})' for size, name in _IMAGES.items())}"
        )
    options = {"root": arguments.root} if kind == "MNIST" else {}
    module = getattr(data, kind)(eval_batch_size=arguments.batch, **options)
    module.prepare_data()
    module.setup()
    images, labels = next(iter(module.test_dataloader()))

    def loss(network: SequenceClassifier, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(network(batch[0]), batch[1])

    return _Task((images.double(), labels), loss, f"{len(images)} test images of {kind}")


def _lines(arguments: argparse.Namespace, model: Handwriting) -> _Task:
    """The beginnings of the first lines of handwriting that are long enough; the last point's loss.

    The loss of all points would give each state a gradient of its own, and hide how far gradients
    reach back.
    """
    from ln_zoo.data import IAMOnDB, LineSet

    data = IAMOnDB(arguments.root)
    data.prepare_data()
    data.setup()
    lines, steps = data.lines("test"), arguments.steps
    long = [i for i, targets in enumerate(lines.targets) if targets >= steps][: arguments.batch]
    if not long:
        raise ValueError(
            f"no line of the test set has {steps} points behind its first, the longest has "
            f"{max(lines.targets)}: give fewer --steps"
        )
    # Offsets that were not scaled had been divided by the median step of their line.
    per_line = bool((model.offset_mean == 0).all() and (model.offset_std == 1).all())
    offsets, _, texts, _ = LineSet(lines.lines, per_line=per_line, max_points=steps)[
        torch.tensor(long)
    ]
    points = model.standardize(offsets).transpose(0, 1)
    # The null vector, which standardising would have moved.
    inputs = torch.cat([torch.zeros_like(points[:1]), points[1:-1]])
    text = None if model.window is None else model.encode(texts)

    def loss(network: Handwriting, batch: tuple[Tensor, Tensor | None, Tensor]) -> Tensor:
        inputs, text, last = batch
        outputs, _ = network(inputs, text)
        return network.mixture(outputs[-1]).nll(last).mean()

    first = 1 if model.window is None else 2  # the layer with the window is a loop of its own
    said = f"{len(long)} lines of IAM-OnDB"
    return _Task((inputs, text, points[-1]), loss, said, first)
