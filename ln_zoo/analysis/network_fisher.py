"""Fisher information of whole networks, a block for each layer (paper, section 5.2; eq. 8-9).

F = (1 / N) sum_n J_n^T C_n J_n / phi^2, with J_n the Jacobian of the natural parameters s = f(x,
theta) and C_n the covariance of the predicted output. Diagonal blocks, one for each layer, are
exact. For other densities, `network_empirical_fisher` averages over given outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ln_zoo.analysis.fisher import Family, check_dispersion
from ln_zoo.analysis.stepping import Statistics, measuring, same_random_numbers
from ln_zoo.norms import Site, batch_dependent
from ln_zoo.utils.checks import check_at_least, check_choice, check_optional

#: ``natural(batch)``: natural parameters (N, \*, K).
Natural = Callable[[Any], Tensor]
Batch = Tensor | tuple[Tensor, ...]
#: Product of a matrix with a vector.
Product = Callable[[Tensor], Tensor]

#: Examples differentiated at once in a product with a vector.
_EXAMPLES_AT_ONCE = 64
#: The largest eigenvalue converges when `_STILL` iterations change it by at most this fraction.
_STILL = 3
_PRECISION = 1e-9
_MOST_PRODUCTS = 300


@dataclasses.dataclass(frozen=True)
class FisherBlock:
    """Fisher information of one layer's parameters."""

    #: Shapes by name, in the order in which they are flattened and concatenated.
    parameters: dict[str, tuple[int, ...]]
    diagonal: Tensor  #: diagonal of the block, (P,)
    matrix: Tensor | None  #: the block, (P, P); None if P is above `max_size`
    largest: float  #: its largest eigenvalue; NaN if not computed

    @property
    def size(self) -> int:
        """Number P of parameters."""
        return len(self.diagonal)

    @property
    def trace(self) -> float:
        """Sum of the eigenvalues."""
        return float(self.diagonal.sum())

    def part(self, row: str, column: str | None = None) -> Tensor:
        """Submatrix of two of the layer's parameters; ``column`` defaults to ``row``."""
        if self.matrix is None:
            raise ValueError(
                f"the matrix of this block of {self.size} parameters was not kept: call "
                "network_fisher with a max_size of at least that"
            )
        return self.matrix[self._slice(row), self._slice(row if column is None else column)]

    def _slice(self, name: str) -> slice:
        sizes = {other: torch.Size(shape).numel() for other, shape in self.parameters.items()}
        stop = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))[name]
        return slice(stop - sizes[name], stop)


def layer_blocks(network: nn.Module) -> dict[str, list[str]]:
    """Names of a network's trainable parameters, by the name of their module.

    Parameters of a `ln_zoo.norms.Site` (gain, shift, scale) belong to the layer that contains it. A
    recurrent layer is one block, with all its layers and directions.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> from ln_zoo.norms import LayerNorm
        >>> layer_blocks(nn.Sequential(Linear(2, 3, norm=LayerNorm()), nn.ReLU(), Linear(3, 1)))
        {'0': ['0.weight', '0.bias', '0.site.gain'], '2': ['2.weight', '2.bias']}
    """
    modules = dict(network.named_modules())
    blocks: dict[str, list[str]] = {}
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = name.rpartition(".")[0]
        # From the site up to the layer.
        if isinstance(modules[owner], Site):
            owner = owner.rpartition(".")[0]
            while owner and not modules[owner]._parameters:
                owner = owner.rpartition(".")[0]
        blocks.setdefault(owner, []).append(name)
    return blocks


def network_fisher(
    network: nn.Module,
    batch: Batch,
    natural: Natural | None = None,
    *,
    family: Family = "categorical",
    dispersion: float = 1.0,
    blocks: Mapping[str, Sequence[str]] | None = None,
    max_size: int = 4096,
    outputs_at_once: int | None = None,
    statistics: Statistics = "kept",
    largest: bool = True,
) -> dict[str, FisherBlock]:
    r"""Blocks of a network's Fisher information on a batch, by name, one for each layer.

    The network must be differentiable by `torch.func`; recurrent layers of ln_zoo then run on their
    generic loop. It runs in evaluation mode, and is unchanged.

    Args:
        network: the network, ideally in float64 (``copy.deepcopy(network).double()``).
        batch: a tensor, or a tuple of tensors, with examples along the first axis.
        natural: ``natural(batch)``, natural parameters computed with this network: (N, K), or (N,
            \*, K) for several outputs of an example (T time steps, say) that are independent given
            the inputs; F is the sum over them. Multiply padding by 0. Default: the network itself,
            as for the logits of classifiers.
        family: distribution of the output: ``"categorical"``: K classes by their logits;
            ``"bernoulli"``: K independent outputs by their logits; ``"gaussian"``: K independent
            outputs of variance phi by their means. For others, use `network_empirical_fisher`.
        dispersion: phi, positive; 1 for families other than ``"gaussian"``.
        blocks: names of parameters of each block; default: `layer_blocks`.
        max_size: keep the matrix of blocks with at most this many parameters.
        outputs_at_once: rows of the K outputs of an example to differentiate at once, each with the
            memory of all parameters; default: all.
        statistics: statistics of batch-dependent norms: ``"kept"``, the running ones, as in
            evaluation; or ``"batch"``, differentiated through, with the whole batch at once.
        largest: compute the largest eigenvalue of blocks without matrix too, by a Lanczos iteration
            on products with vectors; otherwise NaN.

    Raises:
        ValueError: for batch statistics of one example, a network without trainable parameters, or
            natural parameters that do not depend on it.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> from ln_zoo.norms import LayerNorm
        >>> network = nn.Sequential(Linear(4, 6, norm=LayerNorm()), nn.ReLU(), Linear(6, 3))
        >>> found = network_fisher(network.double(), torch.randn(5, 4).double())
        >>> {name: tuple(block.matrix.shape) for name, block in found.items()}
        {'0': (36, 36), '2': (21, 21)}
    """
    _check(family, dispersion, max_size, outputs_at_once)
    parameters = {
        block: {name: network.get_parameter(name).detach() for name in names}
        for block, names in _chosen(network, blocks).items()
    }
    together = statistics == "batch" and batch_dependent(network)
    examples = _examples(batch)
    model = _Model(network, natural, family, dispersion, together)
    parts = [batch] if together else [_take(batch, n) for n in range(examples)]
    sums = {
        block: _Sum(sum(a.numel() for a in own.values()), max_size)
        for block, own in parameters.items()
    }
    everything = {name: a for own in parameters.values() for name, a in own.items()}
    found = {}
    with torch.no_grad(), measuring(network, statistics):
        model.check_dependence(everything, parts[0])
        for part in parts:
            for gradients in model.scores(everything, part, outputs_at_once):
                for block, own in parameters.items():
                    sums[block].add(torch.cat([gradients[name].flatten(1) for name in own], dim=1))
        for block, own in parameters.items():
            diagonal, matrix = sums[block].diagonal / examples, sums[block].matrix
            product: Product = functools.partial(model.product, own, batch, examples)
            if matrix is not None:
                matrix = matrix / examples
                product = matrix.mv
            greatest = math.nan
            if largest or matrix is not None:
                greatest = _largest_eigenvalue(product, diagonal)
            shapes = {name: tuple(a.shape) for name, a in own.items()}
            found[block] = FisherBlock(shapes, diagonal, matrix, greatest)
    return found


def network_empirical_fisher(
    network: nn.Module,
    batch: Batch,
    log_likelihood: Natural,
    *,
    blocks: Mapping[str, Sequence[str]] | None = None,
    max_size: int = 4096,
    statistics: Statistics = "kept",
    largest: bool = True,
) -> dict[str, FisherBlock]:
    """Blocks of the mean of score score^T over given outputs, one for each layer.

    For any density, such as the mixtures of `ln_zoo.models.Handwriting`. Over outputs of a data set
    this is not the Fisher information (see `ln_zoo.analysis.empirical_fisher`); over outputs drawn
    from the model it is a Monte-Carlo estimate with an error of order 1 / sqrt(N). Repeat inputs
    for several draws. Further arguments, results and errors as in `network_fisher`.

    Args:
        batch: a tensor, or a tuple of tensors, inputs and outputs, with examples along the first
            axis.
        log_likelihood: ``log_likelihood(batch)``: log P(output | input) of each example, (N,), in
            nats, computed with this network; or a bound of it.
    """

    def natural(part: Batch) -> Tensor:
        return log_likelihood(part).view(_examples(part), 1)

    # The score equals the derivative of the mean of one Gaussian output of variance 1.
    return network_fisher(
        network,
        batch,
        natural,
        family="gaussian",
        blocks=blocks,
        max_size=max_size,
        statistics=statistics,
        largest=largest,
    )


def _chosen(network: nn.Module, blocks: Mapping[str, Sequence[str]] | None) -> dict[str, list[str]]:
    found = layer_blocks(network) if blocks is None else {b: [*own] for b, own in blocks.items()}
    if not found or not all(found.values()):
        raise ValueError(
            f"no parameter of this {type(network).__name__} in a block: set requires_grad, or name "
            "the parameters in blocks"
        )
    return found


class _Sum:
    """Sum over rows r (1, P) of r^T r, or of its diagonal alone."""

    def __init__(self, size: int, max_size: int) -> None:
        self.keep = size <= max_size
        self.matrix: Tensor | None = None
        self.diagonal = torch.zeros(())

    def add(self, rows: Tensor) -> None:
        self.diagonal = self.diagonal.to(rows) + rows.square().sum(0)
        if self.keep:
            product = rows.T @ rows
            self.matrix = product if self.matrix is None else self.matrix.add_(product)


class _Call(nn.Module):
    """``natural`` as a module, so that `functional_call` can replace the network's weights."""

    def __init__(self, network: nn.Module, natural: Natural | None) -> None:
        super().__init__()
        self.network = network
        # In a tuple, not registered: weights must have one name.
        self._natural = (natural,)

    def forward(self, batch: Batch) -> Tensor:
        natural = self._natural[0] or self.network
        s: Tensor = natural(batch)
        return s


@dataclasses.dataclass(frozen=True)
class _Model:
    network: nn.Module
    natural: Natural | None
    family: Family
    dispersion: float
    together: bool

    def __call__(self, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Natural parameters (N M, K) of M outputs of each example, with replaced parameters."""
        call = _Call(self.network, self.natural)
        replaced = {f"network.{name}": a for name, a in parameters.items()}
        # Noise of models must be equal in all passes.
        with same_random_numbers(self.network):
            s: Tensor = torch.func.functional_call(call, replaced, (batch,))
        return s.flatten(0, -2)

    def check_dependence(self, parameters: Mapping[str, Tensor], batch: Batch) -> None:
        """Raise ValueError if outputs do not depend on these parameters."""
        leaves = {name: a.clone().requires_grad_() for name, a in parameters.items()}
        with torch.enable_grad():
            s = self(leaves, batch).sum()
        wanted = [*leaves.values()] if s.requires_grad else []
        gradients = torch.autograd.grad(s, wanted, allow_unused=True) if wanted else ()
        if all(gradient is None for gradient in gradients):
            raise ValueError(
                "natural parameters, or log-likelihoods, do not depend on these parameters: "
                f"compute them with this very {type(self.network).__name__}, not with a copy, and "
                "without torch.no_grad or detach"
            )

    def factor(self, s: Tensor) -> Tensor:
        """Matrices A (rows, K, K) with A A^T = C / phi^2, for natural parameters (rows, K)."""
        if self.family == "categorical":
            p = s.softmax(-1)
            root = p.sqrt()
            # (R - p r^T) (R - p r^T)^T = diag(p) - p p^T, for r = sqrt(p), R = diag(r), |r| = 1.
            scale = torch.diag_embed(root) - p.unsqueeze(-1) * root.unsqueeze(-2)
        elif self.family == "bernoulli":
            p = s.sigmoid()
            scale = torch.diag_embed((p * (1 - p)).sqrt())
        else:
            scale = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device).expand(len(s), -1, -1)
        return scale / math.sqrt(self.dispersion)

    def scores(
        self, parameters: dict[str, Tensor], batch: Batch, at_once: int | None
    ) -> Iterator[dict[str, Tensor]]:
        """Rows of A_n^T J_n of all outputs n, (r, *shape) for each parameter, r rows at a time."""
        s, backward = torch.func.vjp(lambda p: self(p, batch), parameters)[:2]
        for number, factor in enumerate(self.factor(s.detach())):
            for columns in factor.T.split(at_once or len(factor)):
                rows: list[dict[str, Tensor]] = []
                for column in columns:
                    cotangent = torch.zeros_like(s)
                    cotangent[number] = column
                    # vmap fails with the memory format of convolutions.
                    rows.append(backward(cotangent)[0])
                yield {name: torch.stack([row[name] for row in rows]) for name in parameters}

    def product(
        self, parameters: dict[str, Tensor], batch: Batch, examples: int, vector: Tensor
    ) -> Tensor:
        """Product of the block of these parameters with a vector (P,)."""
        parts = vector.split([a.numel() for a in parameters.values()])
        tangents = {
            name: part.view_as(a) for part, (name, a) in zip(parts, parameters.items(), strict=True)
        }
        total = torch.zeros_like(vector)
        at_once = examples if self.together else _EXAMPLES_AT_ONCE
        for first in range(0, examples, at_once):
            piece = _take(batch, first, at_once)

            def outputs(p: dict[str, Tensor], piece: Batch = piece) -> Tensor:
                return self(p, piece)

            s, backward = torch.func.vjp(outputs, parameters)[:2]
            # J v is the derivative of J^T u by u; forward mode fails with the memory format of
            # convolutions.
            transposed = torch.func.vjp(backward, torch.zeros_like(s))[1]
            (moved,) = transposed((tangents,))
            factor = self.factor(s)
            weighted = (factor @ (factor.mT @ moved.unsqueeze(-1))).squeeze(-1)
            (gradients,) = backward(weighted)
            total += torch.cat([gradients[name].flatten() for name in parameters])
        return total / examples


def _largest_eigenvalue(product: Product, like: Tensor) -> float:
    """Largest eigenvalue of a positive semidefinite matrix, by a Lanczos iteration.

    Without reorthogonalisation: rounding repeats eigenvalues, but does not change the largest.
    """
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
    v = v / v.norm()
    before, beta = torch.zeros_like(v), v.new_zeros(())
    diagonal: list[Tensor] = []
    off: list[Tensor] = []
    value, still = 0.0, 0
    while len(diagonal) < min(_MOST_PRODUCTS, len(v)) and still < _STILL:
        w = product(v) - beta * before
        diagonal.append(v @ w)
        w = w - diagonal[-1] * v
        small = torch.diag(torch.stack(diagonal))
        if off:
            sides = torch.stack(off)
            small = small + torch.diag(sides, 1) + torch.diag(sides, -1)
        found = float(torch.linalg.eigvalsh(small)[-1])
        still = still + 1 if abs(found - value) <= _PRECISION * abs(found) else 0
        value, beta = found, w.norm()
        if float(beta) <= _PRECISION * abs(value):
            break
        before, v = v, w / beta
        off.append(beta)
    return value


def _check(family: Family, dispersion: float, max_size: int, outputs_at_once: int | None) -> None:
    check_choice("family", family, get_args(Family))
    check_dispersion(family, dispersion)
    check_at_least(0, max_size=max_size)
    check_optional(1, outputs_at_once=outputs_at_once)


def _examples(batch: Batch) -> int:
    tensors = batch if isinstance(batch, tuple) else (batch,)
    sizes = {len(a) if isinstance(a, Tensor) and a.dim() else 0 for a in tensors}
    if len(sizes) != 1 or 0 in sizes:
        shapes = [tuple(getattr(a, "shape", ())) for a in tensors]
        raise ValueError(
            "the batch must be a tensor or a tuple of tensors with the examples along the first "
            f"axis, at least one and equally many in each; got {shapes}"
        )
    return sizes.pop()


def _take(batch: Batch, first: int, examples: int = 1) -> Batch:
    if isinstance(batch, tuple):
        return tuple(a[first : first + examples] for a in batch)
    return batch[first : first + examples]
