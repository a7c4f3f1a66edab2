"""Initial values other than torch's: orthogonal recurrent weights, and scales from data."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import init

from ln_zoo.layers.cells import RecurrentCell
from ln_zoo.layers.conv import Conv2d
from ln_zoo.layers.linear import Linear
from ln_zoo.layers.recurrent import RecurrentLayer
from ln_zoo.norms import batch_statistics
from ln_zoo.norms.modes import evaluation_mode
from ln_zoo.utils.checks import check_choice

#: Rounding of sums, in units of eps of their precision.
_ROUNDING = 16


@torch.no_grad()
def orthogonal_init(
    layer: RecurrentLayer,
    candidate: Literal["identity", "orthogonal"] = "identity",
    forget_bias: float = 1.0,
    generator: torch.Generator | None = None,
) -> None:
    """Initialise a layer as recurrent batch normalisation does (arXiv 1603.09025, section 5).

    Input weights are orthogonal. Recurrent weights of the candidate state (an LSTM's g, a GRU's n,
    all of an RNN's; `ln_zoo.ops.Cell.candidates`) are the identity or orthogonal; weights of the
    gates are slices of one orthogonal matrix (H, gates H); with ``blocks``, each block by itself.
    Biases are 0, except the LSTM's forget gate (`ln_zoo.ops.Cell.forget`). Projections and a cell's
    own weights are unchanged. Norm parameters that depend on weights are recomputed.

    Args:
        layer: a recurrent layer, with any number of layers and directions.
        candidate: recurrent weights of the candidate state.
        forget_bias: sum of both biases of an LSTM's forget gate.
        generator: random generator; default torch's own.

    Raises:
        ValueError: for another ``candidate``.

    Example:
        >>> from ln_zoo.layers import RNN
        >>> layer = RNN(3, 5)
        >>> orthogonal_init(layer)
        >>> layer.weight_hh_l0.equal(torch.eye(5))
        True
    """
    check_choice("candidate", candidate, ("identity", "orthogonal"))
    for name, parameter in layer.named_parameters():
        kind = name.partition("_l")[0]
        if kind == "weight_ih":
            orthogonal_(parameter, generator)
        elif kind == "weight_hh":
            _start_recurrent(layer, parameter, candidate, generator)
        elif kind in ("bias_ih", "bias_hh"):
            init.zeros_(parameter)
    set_forget_bias(layer, forget_bias)
    layer.reset_norm()


@torch.no_grad()
def orthogonal_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`torch.nn.init.orthogonal_` that accepts half precision too: drawn in float32 and rounded."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    drawn = torch.empty_like(tensor, dtype=wide, memory_format=torch.contiguous_format)
    return tensor.copy_(init.orthogonal_(drawn, generator=generator))


def _start_recurrent(
    layer: RecurrentLayer, weight: Tensor, candidate: str, generator: torch.Generator | None
) -> None:
    units = layer.hidden_size // layer.blocks
    for block in [weight] if layer.blocks == 1 else weight:
        gates = []
        for number, rows in enumerate(block.split(units)):
            if number not in layer.cell.candidates:
                gates.append(rows)
            elif candidate == "identity":
                init.eye_(rows)
            else:
                orthogonal_(rows, generator)
        if gates:
            drawn = weight.new_empty(block.shape[1], units * len(gates))
            orthogonal_(drawn, generator)
            for rows, part in zip(gates, drawn.split(units, dim=1), strict=True):
                rows.copy_(part.T)


@torch.no_grad()
def set_forget_bias(module: nn.Module, bias: float) -> None:
    """Set the bias of every forget gate (`ln_zoo.ops.Cell.forget`) in a module.

    ``bias`` is the new value of ``bias_ih``; ``bias_hh`` becomes 0.
    """
    for layer in module.modules():
        if not isinstance(layer, RecurrentLayer | RecurrentCell):
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            if name.startswith(("bias_ih", "bias_hh")):
                for block in layer.cell.forget:
                    value = bias if name.startswith("bias_ih") else 0.0
                    parameter.split(layer.hidden_size)[block].fill_(value)


@torch.no_grad()
def data_dependent_init(model: nn.Module, batch: Any) -> list[str]:
    """Set scales and biases so that features have mean 0 and variance 1 on a batch.

    After Salimans and Kingma (2016, arXiv 1602.07868, section 3): every `Linear` and `Conv2d` whose
    norm has a scale (`WeightNorm`) gets, in the order of the forward pass, ``scale = 1 / sigma[t]``
    and ``bias = -mu[t] / sigma[t]`` with ``t = w x / |w|``: mean and biased variance of each
    feature over the batch, and in convolutions over positions. Each layer sees the updated outputs
    of the layers before it. A layer without bias gets only a scale; a layer used several times is
    set at its first use. A feature that is constant on the batch, up to rounding, keeps its scale,
    and its bias becomes minus its mean. Recurrent layers are skipped, as in the source: statistics
    of their units change over time.

    The pass runs without gradients, in evaluation mode; norms that mix examples use batch
    statistics. Modes, running averages, generators and gradients are restored; if the pass fails,
    scales and biases too.

    Args:
        model: a module that contains such layers.
        batch: the model's input; a tuple or list is unpacked, ``model(*batch)``. The source takes
            500 training examples.

    Returns:
        Names of the layers that were set, in the order of the forward pass.

    Raises:
        ValueError: if there is no such layer, or pre-activations are not finite.

    Example:
        >>> from ln_zoo.norms import WeightNorm
        >>> model = nn.Sequential(Linear(5, 8, norm=WeightNorm()), nn.ReLU(), Linear(8, 3))
        >>> x = torch.randn(100, 5)
        >>> data_dependent_init(model, x)
        ['0']
        >>> torch.allclose(model[0](x).mean(0), torch.zeros(8), atol=1e-5)
        True
    """
    layers = scaled_layers(model)
    if not layers:
        raise ValueError(
            f"data_dependent_init looks for Linear and Conv2d layers with norm=WeightNorm(), and "
            f"this {type(model).__name__} has none (recurrent layers are skipped)"
        )
    values = [value for layer in layers.values() for value in (scale_of(layer), layer.bias)]
    former = [(value, value.clone()) for value in values if value is not None]
    done: list[str] = []

    def first_use(
        name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        handles[name].remove()
        _set_from(layers[name], name, args, kwargs)
        done.append(name)

    handles = {
        name: layer.register_forward_pre_hook(partial(first_use, name), with_kwargs=True)
        for name, layer in layers.items()
    }
    try:
        with evaluation_mode(model), batch_statistics(model):
            if isinstance(batch, tuple | list):
                model(*batch)
            else:
                model(batch)
    except BaseException:
        for value, before in former:
            value.copy_(before)
        raise
    finally:
        for handle in handles.values():
            handle.remove()
    return done


def scaled_layers(model: nn.Module) -> dict[str, Linear | Conv2d]:
    """Layers that `data_dependent_init` sets, by name, in the order of the model's modules."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear | Conv2d) and module.site.norm.weight_scale is not None
    }


def scale_of(layer: Linear | Conv2d) -> Tensor:
    """The scale (F,) of one of the `scaled_layers`."""
    name = layer.site.norm.weight_scale
    assert name is not None
    return layer.site.get_parameter(name)


def has_fresh_scale(layer: Linear | Conv2d) -> bool:
    """Whether the scale is still the length of each row of the weight, as initialised."""
    weight = layer.weight.detach()
    # Larger than rounding to another precision, smaller than a training step.
    close = max(1e-4, 4 * torch.finfo(weight.dtype).eps)
    return torch.allclose(layer.site.weight(weight), weight, rtol=close, atol=0.0)


def _set_from(
    layer: Linear | Conv2d, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    scale, bias = scale_of(layer), layer.bias
    kept = scale.clone()
    scale.fill_(1.0)
    if bias is not None:
        bias.zero_()
    sums = layer.forward(*args, **kwargs)  # not __call__, which runs hooks
    if sums.dim() == 3 and layer.site.axis == 1:
        sums = sums.unsqueeze(0)  # a convolution of one example
    rows = sums.movedim(layer.site.axis, -1).reshape(-1, layer.site.features)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, 0, correction=0)
    if not bool(torch.isfinite(variance).all()):
        raise ValueError(
            f"the pre-activations of {name} are not finite on this batch: check data and weights "
            "for NaN or infinite values"
        )
    # Pre-activations of equal inputs may differ by summation order.
    rounding = _ROUNDING * torch.finfo(wide.dtype).eps * wide.abs().max()
    rounding = rounding + torch.finfo(rows.dtype).eps * mean.abs()
    deviation = variance.sqrt()
    varies = deviation > rounding
    new = torch.where(varies, deviation.masked_fill(~varies, 1.0).reciprocal(), kept)
    scale.copy_(new)
    if bias is not None:
        bias.copy_(-mean * new)
