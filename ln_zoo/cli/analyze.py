"""``ln-zoo analyze``: effects of normalisation, each as a table and, if asked for, a picture."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ln_zoo.cli.commands import Count, File, Picture, Seed, at_least, positive

if TYPE_CHECKING:
    from torch import Tensor

    from ln_zoo.analysis import Dynamics
    from ln_zoo.layers import RecurrentLayer

NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, positive]


def gradient_flow(
    *,
    cell: str = "RNN",
    norm: list[str] = ["BatchNorm", "LayerNorm", "Identity"],  # noqa: B006
    gains: list[Positive] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0],  # noqa: B006
    steps: Count = 784,
    hidden: Count = 100,
    batch: Count = 100,
    candidate: Literal["identity", "orthogonal"] = "identity",
    noise: NonNegative = 0.1,
    seed: Seed = 0,
    data: Literal["pixels", "permuted", "random"] | None = None,
    root: str | None = None,
    out: Picture | None = None,
    csv: File | None = None,
) -> None:
    """Measures how far gradients reach back in time, by method and gain.

    Measures gradients of untrained recurrent layers with respect to their states, from a softmax
    on the last state back to the first (Cooijmans et al. 2017, section 4), in float64. The table
    holds decimal logarithms of their norms.

    Args:
        cell: RNN (tanh), GRU, LSTM, or the class path of your own layer
        norm: classes of ln_zoo.norms, or class paths of your own
        gains: initial gains, for norms that have one
        steps: number of time steps, one pixel each
        hidden: hidden size
        batch: number of sequences
        candidate: initial recurrent weights of the candidate state
        noise: standard deviation of the initial states
        seed: seed of the weights and states
        data: input: pixels of MNIST row by row, the same pixels in a fixed random order, or random
            numbers; default: pixels if $LN_ZOO_DATA has MNIST, otherwise random
        root: folder of MNIST; default: $LN_ZOO_DATA/mnist, or a download from the hub
        out: picture to write (.png, .svg); default: none
        csv: table to write: t and a column for each layer
    """
    from ln_zoo import analysis
    from ln_zoo.norms.config import norm_class

    norms, layer = [norm_class(name) for name in norm], _layer(cell)
    inputs, described = _sequences(data, root, steps, batch, seed)
    flows = analysis.gradient_flow(inputs, layer, hidden, norms, gains, candidate, noise, seed)
    title = (
        f"{layer.__name__}, H = {hidden}, {candidate} recurrent weights; {described}, {batch} "
        "sequences"
    )
    print(f"{title}\n\n{analysis.gradient_flow_table(flows)}")
    if out:
        from ln_zoo.plots import plot_gradient_flow

        plot_gradient_flow(flows, out, title)
    if csv:
        analysis.write_gradient_flow(flows, csv, described)


def _layer(name: str) -> type[RecurrentLayer]:
    """The recurrent layer of that name, ``LSTM``, ``GRU`` or ``RNN``, or of that class path."""
    from ln_zoo.layers import recurrent_layer

    return recurrent_layer({"class_path": name} if "." in name else name)


def _sequences(
    kind: str | None, root: str | None, steps: int, batch: int, seed: int
) -> tuple[Tensor, str]:
    from ln_zoo.analysis import random_sequences

    if kind != "random":
        from ln_zoo.data import MNIST
        from ln_zoo.data.folders import local_folder

        kind = kind or ("pixels" if local_folder(root, "mnist") else "random")
    if kind == "random":
        return random_sequences(steps, batch, seed=seed), "random numbers"
    if steps > 784:
        raise ValueError(f"images of MNIST have 784 pixels, got --steps {steps}")
    most = MNIST.source_size - 1  # at least one is held out for validation
    if batch > most:
        raise ValueError(
            f"--batch must be at most {most}, the training images of MNIST, got {batch}"
        )
    data = MNIST(root, train_size=batch, val_size=1)
    data.prepare_data()
    data.setup()
    images, _ = next(iter(data.train_eval_dataloader(batch)))
    pixels = images.flatten(1).T.unsqueeze(-1).double()
    if kind == "pixels":
        return pixels[:steps], "MNIST, pixels in order"
    from ln_zoo.models import SequenceClassifier

    return pixels[SequenceClassifier.random_permutation()[:steps]], "MNIST, permuted pixels"


def _print_table(table: Any, form: str) -> None:
    from rich.console import Console

    if form == "rich":
        Console(highlight=False).print(table)
    else:
        print(getattr(table, form)())


def fisher(
    *,
    units: int = 4,
    features: int = 5,
    examples: int = 200,
    draws: int = 500_000,
    seed: int = 0,
    format: Literal["rich", "markdown", "csv"] = "rich",
    out: Picture | None = None,
    csv: File | None = None,
) -> None:
    """Compares the Fisher information of normalised GLMs with the paper's formulas.

    Tests section 5.2 of the layer normalization paper on random generalised linear models in
    float64. It compares the formulas, as printed and corrected, with automatic differentiation, and
    measures the effect of the scale of weights and data.

    Args:
        units: number of units, H
        features: size of the inputs, D
        examples: number of inputs, N
        draws: number of sampled outputs over all examples; a tenth and a hundredth are used as well
        seed: seed of models, data and sampled outputs
        format: format of the table on standard output; rich is for a terminal
        out: picture to write (.png, .svg); default: none
        csv: table to write, with the numbers of the picture
    """
    from ln_zoo.reproduction import fisher_claims

    study = fisher_claims.study_fisher(units, features, examples, draws, seed)
    _print_table(study, format)
    if out:
        from ln_zoo.reproduction.fisher_picture import plot_fisher

        models = f"GLMs of {units} units, {features} inputs, {examples} examples"
        plot_fisher(study, out, f"Fisher information of normalised {models}")
    if csv:
        fisher_claims.write_fisher_curves(study, csv)


def _eps(option: str, text: str) -> None:
    try:
        valid = text == "shipped" or 0 <= float(text) < math.inf
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, or 'shipped'; got {text!r}")


def invariance(
    *,
    norm: list[str] = ["BatchNorm", "WeightNorm", "LayerNorm", "RMSNorm", "Identity"],  # noqa: B006
    eps: Annotated[str, _eps] = "0",
    format: Literal["rich", "markdown", "latex", "csv"] = "rich",
    examples: Annotated[int, at_least(2)] = 16,
    inputs: Count = 8,
    features: Annotated[int, at_least(2)] = 6,
    factors: list[float] = [0.25, 3.0],  # noqa: B006
    weight_scale: Positive = 1.0,
    seed: Seed = 0,
    out: Picture | None = None,
    csv: File | None = None,
) -> None:
    """Computes Table 1 of the paper: invariances of a layer's output, by method.

    Transforms the weights and data of a random layer in float64, compares its outputs, and checks
    the invariances that each norm declares. The picture shows how much eps affects the invariance
    to rescaled weights.

    Args:
        norm: classes of ln_zoo.norms, or class paths of your own, such as my_norm.MyNorm
        eps: eps of all norms; 'shipped' for the default of each
        format: format of the table on standard output; rich is for a terminal
        examples: number of inputs, N
        inputs: size of each input, I
        features: number of units, F
        factors: factors for weights and data; the table shows the largest deviation
        weight_scale: factor for the weights before measuring: at 1e-3 the usual eps matters
        seed: seed of the weights and data
        out: picture to write (.png, .svg); default: none
        csv: table to write, with the numbers of the picture
    """
    from ln_zoo import analysis

    value = None if eps == "shipped" else float(eps)
    from ln_zoo.norms.config import norm_class

    norms = [norm_class(name)() for name in norm]
    data = analysis.random_inputs(examples, inputs, seed)
    _print_table(
        analysis.invariance_table(norms, value, data, features, factors, weight_scale, seed), format
    )
    if not (out or csv):
        return
    effects, refused = [], []
    for each in norms:
        try:  # eps 0 has no effect to draw: the picture shows the default eps
            effects += analysis.eps_effect(
                each, value or None, factors, inputs=data, features=features, seed=seed
            )
        except ValueError as error:
            refused.append(str(error))
    if not effects:
        missing = " and ".join(str(path) for path in (out, csv) if path)
        print("\n".join([f"no {missing} written", *refused]), file=sys.stderr)
        return
    if out:
        from ln_zoo.plots import plot_eps_effect

        plot_eps_effect(effects, out, "Effect of eps on the invariance to rescaled weights")
    if csv:
        analysis.write_eps_effect(effects, csv)


def dynamics(
    *,
    cell: list[str] = ["LSTM", "GRU", "RNN"],  # noqa: B006
    norm: list[str] = ["LayerNorm", "RMSNorm", "BatchNorm", "WeightNorm", "Identity"],  # noqa: B006
    gains: list[Positive] = [0.1, 0.5, 1.0],  # noqa: B006
    start: Literal["torch", "orthogonal", "identity"] = "torch",
    recurrent_scale: Positive = 1.0,
    hidden: Count = 256,
    features: Count = 256,
    noise: NonNegative = 0.1,
    steps: Annotated[int, at_least(2)] = 200,
    batch: Count = 16,
    exponents: Count = 1,
    skip: int | None = None,
    seed: Seed = 0,
    out: Picture | None = None,
    csv: File | None = None,
) -> None:
    """Measures whether perturbations of hidden states grow or shrink, by method and gain.

    Prints Lyapunov exponents and gradients per step of untrained layers on standard normal inputs,
    in float64. For trained models see `ln-zoo analyze trained_dynamics`.

    Args:
        cell: LSTM, GRU, RNN, or class paths of your own
        norm: classes of ln_zoo.norms, or class paths of your own
        gains: initial gains, or lengths of weight vectors under weight norm
        start: initial weights: torch's own, or orthogonal ones, with orthogonal or identity weights
            for the candidate state
        recurrent_scale: factor of the recurrent weights
        hidden: size of the states
        features: size of each input
        noise: standard deviation of the initial states
        steps: number of time steps
        batch: number of sequences
        exponents: how many exponents to compute, the largest first
        skip: initial steps to exclude from the table; default: a quarter of all
        seed: seed of the weights, inputs and perturbations
        out: picture to write (.png, .svg); default: none
        csv: table to write: layer, step, perturbation, gradient norm
    """
    import torch

    from ln_zoo.analysis import initial_dynamics
    from ln_zoo.norms.config import norm_class

    norms, layers = [norm_class(name) for name in norm], [_layer(name) for name in cell]
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn((steps, batch, features), generator=generator, dtype=torch.float64)
    found: list[Dynamics] = []
    for layer in layers:
        found += initial_dynamics(
            inputs, layer, hidden, norms, gains, start, recurrent_scale, noise, exponents, skip,
            seed,
        )  # fmt: skip
    title = (
        f"H = {hidden}, {features} standard normal inputs per step, {start} weights"
        + (f", recurrent ones times {recurrent_scale:g}" if recurrent_scale != 1 else "")
        + f", {batch} sequences"
    )
    print(f"{title}, {steps} steps")
    show_dynamics(found, title, out, csv)


def show_dynamics(found: list[Dynamics], title: str, out: Path | None, csv: Path | None) -> None:
    """Prints the table of dynamics, and writes the files that were asked for."""
    from ln_zoo import analysis

    print(f"\n{analysis.dynamics_table(found)}")
    if out:
        from ln_zoo.plots import plot_dynamics

        plot_dynamics(found, out, title)
    if csv:
        analysis.write_dynamics(found, csv)
