"""Trained models for `ln-zoo analyze dynamics`, and the same models before training."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
from pathlib import Path

from ln_zoo.analysis import Dynamics, network_dynamics
from ln_zoo.analysis.stepping import drawing
from ln_zoo.cli.stored import load_model
from ln_zoo.models import DynamicsTask
from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Site, keeps_statistics, population_statistics


def trained_dynamics(arguments: argparse.Namespace) -> tuple[list[Dynamics], str]:
    """Of each model's layers, before and after training; and what was read, in words.

    Args:
        arguments: of the command.

    Raises:
        ValueError: for a model whose class does not say what it is run on, or one that cannot be
            measured.
    """
    found: list[Dynamics] = []
    titles: dict[str, None] = {}
    for given in (*arguments.weights, *arguments.ckpt):
        model = load_model(given).double()
        task = _task(model, given, arguments)
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
            several = len(layers) > 1 or task.first_layer > 1
            for number, layer in enumerate(layers.values(), task.first_layer):
                what = f"layer {number}, {when}" if several else when
                name = f"{Path(given).name} {what}"
                found.append(dataclasses.replace(layer, group="", name=name))
        titles[f"{task.description}, {len(found[-1].growth)} steps"] = None
    return found, "; ".join(titles)


def _task(model: ZooModule, given: str, arguments: argparse.Namespace) -> DynamicsTask:
    """What a model is run on, as its class says."""
    if type(model).dynamics_task is ZooModule.dynamics_task:
        raise ValueError(
            f"{given} is a {type(model).__name__}; the dynamics can be measured of models whose "
            "class has dynamics_data and dynamics_task, as SequenceClassifier and Handwriting"
        )
    name, init_args = model.dynamics_data(arguments.batch)
    module, _, name = name.rpartition(".")
    cls = getattr(importlib.import_module(module or "ln_zoo.data"), name)
    if "root" in inspect.signature(cls).parameters:
        init_args = {"root": arguments.root, **init_args}
    data = cls(**init_args)
    data.prepare_data()
    data.setup()
    return model.dynamics_task(data, arguments.batch, arguments.steps)


def _before_training(model: ZooModule, task: DynamicsTask, seed: int) -> ZooModule:
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
