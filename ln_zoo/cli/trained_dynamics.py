"""``ln-zoo analyze trained_dynamics``: stability of hidden states before and after training."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ln_zoo.cli.analyze import show_dynamics
from ln_zoo.cli.commands import Count, File, OwnModules, Picture, Seed, at_least
from ln_zoo.utils.class_paths import import_path

if TYPE_CHECKING:
    from ln_zoo.analysis import Dynamics
    from ln_zoo.models.base import ZooModule
    from ln_zoo.models.dynamics import DynamicsTask


def trained_dynamics(
    models: list[str],
    *,
    statistics: Literal["kept", "batch"] = "kept",
    root: str | None = None,
    steps: Annotated[int, at_least(2)] = 200,
    batch: Count = 16,
    exponents: Count = 1,
    skip: int | None = None,
    seed: Seed = 0,
    out: Picture | None = None,
    csv: File | None = None,
    import_: OwnModules = [],  # noqa: B006
) -> None:
    """Measures whether perturbations of hidden states grow or shrink in trained models.

    Prints Lyapunov exponents and gradients per step of each recurrent layer, in float64, with its
    initial weights and with the trained ones, on test images or lines of handwriting.

    Args:
        models: names of published models, card folders, hub ids, checkpoints or run folders
        statistics: statistics for batch norm: kept for running averages, or batch
        root: folder of the data, MNIST or IAM-OnDB; default: mnist or iam_ondb in $LN_ZOO_DATA, or
            a download of MNIST from the hub
        steps: largest number of time steps
        batch: largest number of sequences
        exponents: how many exponents to compute, the largest first
        skip: initial steps to exclude from the table; default: a quarter of all
        seed: seed of the initial weights and perturbations
        out: picture to write (.png, .svg); default: none
        csv: table to write: layer, step, perturbation, gradient norm
        import_: module that defines a checkpoint's own class
    """
    from ln_zoo.analysis import network_dynamics
    from ln_zoo.zoo.loading import load_model

    found: list[Dynamics] = []
    titles: list[str] = []
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
        titles.append(f"{task.description}, {len(found[-1].growth)} steps")
    title = "; ".join(dict.fromkeys(titles))
    print(title)
    show_dynamics(found, title, out, csv)


def _task(model: ZooModule, given: str, batch: int, steps: int, root: str | None) -> DynamicsTask:
    """The inputs and the loss of a model, as its class defines them."""
    from ln_zoo.models.dynamics import dynamics_source

    source = dynamics_source(model)
    if source is None:
        raise ValueError(
            f"{given} is a {type(model).__name__}, which defines no dynamics_data and "
            "dynamics_task: give a SequenceClassifier or Handwriting model, or define them"
        )
    name, init_args = source.data(batch)
    cls = import_path(name if "." in name else f"ln_zoo.data.{name}")
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
    from ln_zoo.analysis.stepping import cpu_seed
    from ln_zoo.norms import Site, keeps_statistics, population_statistics

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
