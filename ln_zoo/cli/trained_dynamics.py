"""Dynamics of trained models, and of the same models before training."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ln_zoo.analysis import Dynamics, network_dynamics
from ln_zoo.analysis.stepping import cpu_seed
from ln_zoo.models.base import ZooModule
from ln_zoo.models.dynamics import DynamicsTask, dynamics_source
from ln_zoo.norms import Site, keeps_statistics, population_statistics
from ln_zoo.zoo.source import load_model


def trained_dynamics(
    models: Sequence[str],
    steps: int,
    batch: int,
    exponents: int,
    skip: int | None,
    seed: int,
    statistics: Literal["kept", "batch"],
    root: str | None,
) -> tuple[list[Dynamics], str]:
    """Dynamics of each model's layers before and after training, and a description of the data."""
    found: list[Dynamics] = []
    titles: dict[str, None] = {}
    for name in models:
        model = load_model(name).double()
        task = _task(model, name, batch, steps, root)
        networks = {"untrained": _before_training(model, task, seed), "trained": model}
        for when, network in networks.items():
            layers = network_dynamics(
                network, task.batch, task.loss, steps=steps, count=exponents, skip=skip,
                statistics=statistics, seed=seed,
            )  # fmt: skip
            several = len(layers) > 1 or task.first_layer > 1
            for number, layer in enumerate(layers.values(), task.first_layer):
                what = f"layer {number}, {when}" if several else when
                label = f"{Path(name).name} {what}"
                found.append(dataclasses.replace(layer, group="", name=label))
        titles[f"{task.description}, {len(found[-1].growth)} steps"] = None
    return found, "; ".join(titles)


def _task(model: ZooModule, given: str, batch: int, steps: int, root: str | None) -> DynamicsTask:
    """The inputs and the loss of a model, as its class defines them."""
    source = dynamics_source(model)
    if source is None:
        raise ValueError(
            f"{given} is a {type(model).__name__}, which defines no dynamics_data and "
            "dynamics_task: give a SequenceClassifier or Handwriting model, or define them"
        )
    name, init_args = source.data(batch)
    module, _, name = name.rpartition(".")
    cls = getattr(importlib.import_module(module or "ln_zoo.data"), name)
    if "root" in inspect.signature(cls).parameters:
        init_args = {"root": root, **init_args}
    data = cls(**init_args)
    data.prepare_data()
    data.setup()
    return source.task(data, batch, steps)


def _before_training(model: ZooModule, task: DynamicsTask, seed: int) -> ZooModule:
    """The model with fresh weights and the buffers of its data.

    Statistics of batch norm come from the task's examples.
    """
    init_args = {k: v for k, v in model.hparams.items() if not k.startswith("_")}
    taken = {
        f"{place}.{name}".removeprefix("."): buffer
        for place, module in model.named_modules()
        if not isinstance(module, Site)
        for name, buffer in module.named_buffers(recurse=False)
    }
    with cpu_seed(seed):
        fresh = type(model)(**init_args).double().eval()
        fresh.load_state_dict(taken, strict=False)
        if keeps_statistics(fresh):
            with population_statistics(fresh):
                task.loss(fresh, task.batch)
    return fresh
