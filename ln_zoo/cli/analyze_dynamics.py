"""``ln-zoo analyze dynamics``: how stable hidden-to-hidden dynamics are."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ln_zoo.cli.names import strategy_class

if TYPE_CHECKING:
    from torch import Tensor

    from ln_zoo.analysis import Dynamics
    from ln_zoo.models import SequenceClassifier

#: Images by the numbers that a model reads of each.
_IMAGES = {784: "MNIST", 64: "Digits"}


def add_parser(analyses: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to those of ``ln-zoo analyze``."""
    parser = analyses.add_parser(
        "dynamics",
        help="whether perturbations of hidden states grow or die, by strategy and gain",
        description="Growth of small perturbations of the hidden states (Lyapunov exponents) and "
        "of the gradients by them, per step, in float64: of untrained layers that read standard "
        "normal numbers; or, with --weights or --ckpt, of trained sequence classifiers on images, "
        "and of the same models before training.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--weights", nargs="+", metavar="NAME", default=[], help="published models")
    parser.add_argument("--ckpt", nargs="+", metavar="FILE", default=[], help="checkpoints")
    parser.add_argument(
        "--cell", nargs="+", choices=("LSTM", "GRU", "RNN"), default=["LSTM", "GRU", "RNN"]
    )
    parser.add_argument(
        "--norm",
        nargs="+",
        metavar="NAME",
        default=["LayerNorm", "RMSNorm", "BatchNorm", "WeightNorm", "Identity"],
        help="strategies of ln_zoo.norms, or class paths of your own",
    )
    parser.add_argument(
        "--gains",
        nargs="+",
        type=float,
        metavar="GAIN",
        default=[0.1, 0.5, 1.0],
        help="initial gains, or lengths of weight vectors under weight norm",
    )
    parser.add_argument(
        "--start",
        choices=("torch", "orthogonal", "identity"),
        default="torch",
        help="weights: torch's own, or orthogonal ones with these for the candidate state",
    )
    parser.add_argument(
        "--recurrent_scale", type=float, default=1.0, help="multiplies the recurrent weights"
    )
    parser.add_argument("--hidden", type=int, default=256, help="size of the states")
    parser.add_argument("--features", type=int, default=256, help="size of each input")
    parser.add_argument(
        "--noise", type=float, default=0.1, help="standard deviation of the initial states"
    )
    parser.add_argument("--steps", type=int, default=200, help="time steps, at most")
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--exponents", type=int, default=1, help="how many, the largest first")
    parser.add_argument(
        "--skip", type=int, help="first steps to leave out of the table; default: a quarter of them"
    )
    parser.add_argument(
        "--statistics",
        choices=("kept", "batch"),
        default="kept",
        help="of trained models with batch norm: the running ones, or those of the batch; "
        "untrained layers use those of the batch",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, inputs and perturbations")
    parser.add_argument(
        "--root", help="folder of MNIST for trained models; default: $LN_ZOO_DATA/mnist, or the hub"
    )
    parser.add_argument("--out", default="dynamics.png", help="picture to write (.png, .svg)")
    parser.add_argument("--csv", help="table to write: layer, step, perturbation, gradient norm")
    parser.set_defaults(run=_dynamics)


def _dynamics(arguments: argparse.Namespace) -> None:
    least = {"hidden": 1, "features": 1, "noise": 0, "steps": 2, "batch": 1, "exponents": 1}
    for name, smallest in least.items():
        if not getattr(arguments, name) >= smallest:
            given = getattr(arguments, name)
            raise ValueError(f"--{name} must be at least {smallest}, got {given}")
    from ln_zoo.analysis import draw_dynamics, dynamics_table, write_dynamics

    if arguments.weights or arguments.ckpt:
        found = list(_trained(arguments))
        title = f"{arguments.batch} test images"
    else:
        found = list(_untrained(arguments))
        title = (
            f"H = {arguments.hidden}, {arguments.features} standard normal inputs a step, "
            f"{arguments.start} weights"
            + (
                f", recurrent ones times {scale:g}"
                if (scale := arguments.recurrent_scale) != 1
                else ""
            )
            + f", {arguments.batch} sequences"
        )
    print(f"{title}, {len(found[0].growth)} steps\n\n{dynamics_table(found)}")
    draw_dynamics(found, Path(arguments.out), title)
    if arguments.csv:
        write_dynamics(found, Path(arguments.csv))


def _untrained(arguments: argparse.Namespace) -> Iterator[Dynamics]:
    import torch

    from ln_zoo.analysis import initial_dynamics

    norms = [strategy_class(name) for name in arguments.norm]
    generator = torch.Generator().manual_seed(arguments.seed)
    size = (arguments.steps, arguments.batch, arguments.features)
    inputs = torch.randn(size, generator=generator, dtype=torch.float64)
    for cell in arguments.cell:
        yield from initial_dynamics(
            inputs,
            cell,
            arguments.hidden,
            norms,
            arguments.gains,
            arguments.start,
            arguments.recurrent_scale,
            arguments.noise,
            arguments.exponents,
            arguments.skip,
            arguments.seed,
        )


def _trained(arguments: argparse.Namespace) -> Iterator[Dynamics]:
    """Of each model, before and after training."""
    import torch

    from ln_zoo.cli.stored import load_model
    from ln_zoo.models import SequenceClassifier
    from ln_zoo.norms import keeps_statistics, population_statistics

    for name in (*arguments.weights, *arguments.ckpt):
        model = load_model(name)
        if not isinstance(model, SequenceClassifier):
            raise ValueError(
                f"{name} is a {type(model).__name__}; the dynamics of a SequenceClassifier can be "
                "measured"
            )
        model = model.double()
        images, labels = _images(arguments, model)
        trained = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(arguments.seed)
            model.reset_parameters()
            if keeps_statistics(model):
                with population_statistics(model):
                    model(images)
        label = Path(name).name
        yield _measure(arguments, model, images, labels, f"{label} untrained")
        model.load_state_dict(trained)
        yield _measure(arguments, model, images, labels, f"{label} trained")


def _images(arguments: argparse.Namespace, model: SequenceClassifier) -> tuple[Tensor, Tensor]:
    """The first test images, float64, and their labels."""
    from ln_zoo import data

    kind = _IMAGES.get(model.in_features)
    if kind is None:
        raise ValueError(
            f"this model reads {model.in_features} numbers a case; there are images of "
            f"{' and '.join(f'{size} ({name})' for size, name in _IMAGES.items())}"
        )
    options = {"root": arguments.root} if kind == "MNIST" else {}
    module = getattr(data, kind)(eval_batch_size=arguments.batch, **options)
    module.prepare_data()
    module.setup()
    images, labels = next(iter(module.test_dataloader()))
    return images.double(), labels


def _measure(
    arguments: argparse.Namespace,
    model: SequenceClassifier,
    images: Tensor,
    labels: Tensor,
    name: str,
) -> Dynamics:
    from torch.nn import functional as F

    from ln_zoo.analysis import hidden_dynamics
    from ln_zoo.analysis.stepping import measuring

    # What the model gives to its layer, whatever it does to images before.
    given: list[tuple[Tensor, ...]] = []
    hook = model.recurrent.register_forward_pre_hook(lambda _, args: given.append(args))
    try:
        with measuring(model, arguments.statistics):
            model(images)
    finally:
        hook.remove()
    inputs, states = given[0]

    def loss(outputs: Tensor) -> Tensor:
        return F.cross_entropy(model.readout(outputs[-1]), labels)

    return hidden_dynamics(
        model.recurrent,
        inputs[: arguments.steps].detach(),
        states,
        group="",
        name=name,
        loss=loss,
        count=arguments.exponents,
        skip=arguments.skip,
        statistics=arguments.statistics,
        seed=arguments.seed,
    )
