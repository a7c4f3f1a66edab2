"""Fisher information of whole networks, a block for each layer (paper, section 5.2; eq. 8-9).

For outputs from the exponential family with natural parameters s = f(x, theta), the Fisher
information of a batch is F = (1 / N) sum_n J_n^T C_n J_n / phi^2, with J_n the Jacobian of s by the
parameters for example n and C_n the covariance of the output that the model itself predicts there.
Its diagonal blocks, one for each layer, are exact here: the expectation over outputs is in closed
form. For outputs of any other density the mean over given outputs takes its place, under a name of
its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ln_zoo.analysis.fisher import Family, check_dispersion
from ln_zoo.analysis.random_numbers import same_random_numbers
from ln_zoo.analysis.stepping import Statistics, measuring
from ln_zoo.norms import Site, batch_dependent

#: From a batch to natural parameters (N, \*, K).
Natural = Callable[[Any], Tensor]
Batch = Tensor | tuple[Tensor, ...]
#: From a vector to the product of a matrix with it.
Product = Callable[[Tensor], Tensor]

#: Examples of one product with a vector.
_EXAMPLES_AT_ONCE = 64
#: The largest eigenvalue is found when so many products in a row move it by no more than that part.
_STILL = 3
_PRECISION = 1e-9
_MOST_PRODUCTS = 300


@dataclasses.dataclass(frozen=True)
class FisherBlock:
    """The Fisher information of one layer's parameters, or what of it fits in memory.

    Args:
        parameters: names and shapes, in the order in which they are flattened, row by row, and laid
            behind each other.
        diagonal: of the block, (P,).
        matrix: the block, (P, P); ``None`` where P was too large.
        largest: its largest eigenvalue; NaN where that was not asked for.
    """

    parameters: dict[str, tuple[int, ...]]
    diagonal: Tensor
    matrix: Tensor | None
    largest: float

    @property
    def size(self) -> int:
        """Number P of parameters."""
        return len(self.diagonal)

    @property
    def trace(self) -> float:
        """Sum of the eigenvalues."""
        return float(self.diagonal.sum())

    def part(self, row: str, column: str | None = None) -> Tensor:
        """The block of two of the layer's parameters, in the matrix.

        Args:
            row: name of a parameter.
            column: of another; default: the same.

        Returns:
            (numbers of the one, numbers of the other).

        Raises:
            ValueError: if there is no matrix, or no such parameter.
        """
        if self.matrix is None:
            raise ValueError(
                f"the matrix of this block of {self.size} parameters was not kept: call "
                "network_fisher with a max_size of at least that"
            )
        return self.matrix[self._slice(row), self._slice(row if column is None else column)]

    def _slice(self, name: str) -> slice:
        if name not in self.parameters:
            raise ValueError(f"no parameter {name!r} in this block: {', '.join(self.parameters)}")
        start = 0
        for other, shape in self.parameters.items():
            stop = start + torch.Size(shape).numel()
            if other == name:
                break
            start = stop
        return slice(start, stop)


def layer_blocks(network: nn.Module) -> dict[str, list[str]]:
    """Names of a network's parameters by layer: by the module that holds them.

    What a norm put on a `ln_zoo.norms.Site` (gain, shift, scale) belongs to the layer around
    it. Parameters that do not want gradients are left out, those of the network itself have the
    empty name. A recurrent layer is one block, whatever its number of layers and directions.

    Example:
        >>> from ln_zoo.layers import LSTM, Linear
        >>> from ln_zoo.norms import LayerNorm
        >>> layer_blocks(nn.Sequential(Linear(2, 3, norm=LayerNorm()), nn.ReLU(), Linear(3, 1)))
        {'0': ['0.weight', '0.bias', '0.site.gain'], '2': ['2.weight', '2.bias']}
        >>> [len(names) for names in layer_blocks(LSTM(2, 3, norm=LayerNorm())).values()]
        [8]
    """
    modules = dict(network.named_modules())
    blocks: dict[str, list[str]] = {}
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = name.rpartition(".")[0]
        # Up to the layer: past sites, and past what only holds them.
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
    r"""The blocks of a network's Fisher information on a batch, one for each layer.

    Any network that is made of what `torch.func` can differentiate: ln_zoo's layers all are; under
    it recurrent layers run on their generic loop. The network is evaluated in evaluation mode,
    without dropout, and left as it was.

    Args:
        network: the network; everything is computed in its precision, ideally float64
            (``copy.deepcopy(network).double()``).
        batch: a tensor, or a tuple of tensors, with the examples along the first axis of each.
        natural: natural parameters (N, K) of a batch, computed with this very network; or
            (N, \*, K), such as (N, T, K) of outputs at T steps, which are independent given the
            inputs: F is the sum over them. One that is multiplied by 0, as behind the end of a
            shorter sequence, has no part in it. Default: the network itself, as for classifiers,
            whose logits they are.
        family: distribution of the output: ``"categorical"``, of K classes by their logits;
            ``"bernoulli"``, K independent ones by their logits; ``"gaussian"``, K independent ones
            of variance phi by their means. Of others, such as the mixtures of handwriting, there
            is `network_empirical_fisher`.
        dispersion: phi, positive; 1 for families other than ``"gaussian"``.
        blocks: names of parameters for each block; default: `layer_blocks`.
        max_size: up to so many parameters the block itself is kept.
        outputs_at_once: how many rows of an output's K are differentiated at once, each of which
            takes the memory of all parameters; default: all. Examples come one by one.
        statistics: of batch-dependent norms: ``"kept"``, the running ones, as in evaluation;
            or ``"batch"``, those of this batch, through which derivatives flow. The whole batch is
            then differentiated together, and an example's natural parameters depend on it.
        largest: whether to find the largest eigenvalue where the block is not kept: by a Lanczos
            iteration of products of the block with vectors. If not it is NaN there.

    Returns:
        The blocks by name, on the device of the network.

    Raises:
        TypeError: for natural parameters that are not a tensor of real numbers, and blocks that are
            not lists of names.
        ValueError: for an unknown family or parameter, a dispersion that does not fit, numbers
            out of range, batch statistics of one example; without any parameter; for natural
            parameters that are not (N, \*, K), or do not depend on the network.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> from ln_zoo.norms import LayerNorm
        >>> network = nn.Sequential(Linear(4, 6, norm=LayerNorm()), nn.ReLU(), Linear(6, 3))
        >>> found = network_fisher(network.double(), torch.randn(5, 4).double())
        >>> {name: tuple(block.matrix.shape) for name, block in found.items()}
        {'0': (36, 36), '2': (21, 21)}
    """
    _check(family, dispersion, max_size, outputs_at_once)
    named = dict(network.named_parameters())
    chosen = _chosen(network, blocks)
    parameters = {
        block: {name: named[name].detach() for name in names} for block, names in chosen.items()
    }
    together = statistics == "batch" and batch_dependent(network)
    examples = _examples(batch)
    model = _Model(network, natural, family, dispersion, together)
    # Where an example does not see the others it is differentiated alone: nothing is computed
    # twice.
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
    """The blocks of the mean of score score^T over given outputs, one for each layer.

    For networks of any density, such as the mixtures of `ln_zoo.models.Handwriting`. Over outputs
    of a data set this is not the Fisher information, whose outputs are the model's own (see
    `ln_zoo.analysis.empirical_fisher`); over outputs drawn from the model it is a Monte-Carlo
    estimate of it, with an error that falls as 1 / sqrt(N). For several draws of each input give
    the inputs as often.

    Args:
        network: as in `network_fisher`.
        batch: a tensor, or a tuple of tensors, with the examples along the first axis of each:
            inputs and outputs.
        log_likelihood: log P(output | input) of each example of a batch, (N,), in nats, computed
            with this very network. A bound of it, as of variational models, gives the blocks of the
            bound's score.
        blocks: as in `network_fisher`.
        max_size: as in `network_fisher`.
        statistics: as in `network_fisher`.
        largest: as in `network_fisher`.

    Returns:
        The blocks by name, on the device of the network.

    Raises:
        TypeError: as `network_fisher`.
        ValueError: as `network_fisher`, and for log-likelihoods that are not (N,).

    Example:
        >>> from ln_zoo.layers import Linear
        >>> network, x, y = Linear(4, 3).double(), torch.randn(5, 4).double(), torch.arange(5) % 3
        >>> def log_likelihood(batch):
        ...     return -nn.functional.cross_entropy(network(batch[0]), batch[1], reduction="none")
        >>> blocks = network_empirical_fisher(network, (x, y), log_likelihood)
        >>> {name: tuple(block.matrix.shape) for name, block in blocks.items()}
        {'': (15, 15)}
    """

    def natural(part: Batch) -> Tensor:
        found = log_likelihood(part)
        if not isinstance(found, Tensor) or found.shape != (_examples(part),):
            raise ValueError(
                f"log-likelihoods must be a tensor ({_examples(part)},), one for each example, got "
                f"{_described(found)}"
            )
        return found.unsqueeze(1)

    # The score is the derivative of the log-likelihood, as if it were the mean of one Gaussian
    # output of variance 1.
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
    """Names of parameters by block."""
    kind, named = type(network).__name__, dict(network.named_parameters())
    if blocks is None:
        found = layer_blocks(network)
        if not found:
            raise ValueError(
                f"no parameter of this {kind} requires gradients: set requires_grad, or name the "
                "parameters in blocks"
            )
        return found
    if not blocks:
        raise ValueError(
            "blocks must have at least one block, got none; None makes one for each layer"
        )
    for block, names in blocks.items():
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"blocks must have lists of names of parameters, such as ['{next(iter(named), '')}'"
                f"], got {names!r} for {block!r}"
            )
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"a block must have at least one parameter, and each only once, got {[*names]} "
                f"for {block!r}"
            )
        unknown = sorted(set(names) - set(named))
        if unknown:
            raise ValueError(f"no parameters {', '.join(unknown)} in this {kind}")
    return {block: [*names] for block, names in blocks.items()}


def _described(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


class _Sum:
    """Sum over rows r (1, P) of r^T r, or of its diagonal alone."""

    def __init__(self, size: int, max_size: int) -> None:
        self.keep = size <= max_size
        self.matrix: Tensor | None = None
        self.diagonal = torch.zeros(())

    def add(self, rows: Tensor) -> None:
        """Rows (r, P)."""
        self.diagonal = self.diagonal.to(rows) + rows.square().sum(0)
        if self.keep:
            product = rows.T @ rows
            self.matrix = product if self.matrix is None else self.matrix.add_(product)


class _Call(nn.Module):
    """A function that computes with a network, as a module: its weights can be replaced."""

    def __init__(self, network: nn.Module, natural: Natural | None) -> None:
        super().__init__()
        self.network = network
        # A module under a second name would have its weights replaced, and put back, twice.
        self._natural = (natural,)

    def forward(self, batch: Batch) -> Tensor:
        natural = self._natural[0] or self.network
        s: Tensor = natural(batch)
        return s


@dataclasses.dataclass(frozen=True)
class _Model:
    """A network whose outputs have a distribution."""

    network: nn.Module
    natural: Natural | None
    family: Family
    dispersion: float
    together: bool

    def __call__(self, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Natural parameters (N M, K) of the M outputs of each example, example after example.

        With these parameters in place of the network's own.
        """
        call = _Call(self.network, self.natural)
        replaced = {f"network.{name}": a for name, a in parameters.items()}
        # Models may draw noise in training: every pass has to draw the same.
        with same_random_numbers(self.network):
            s: Tensor = torch.func.functional_call(call, replaced, (batch,))
        name, examples = type(self.network).__name__, _examples(batch)
        if not isinstance(s, Tensor) or not s.is_floating_point():
            given = s.dtype if isinstance(s, Tensor) else f"a {type(s).__name__}"
            raise TypeError(
                f"natural parameters must be a floating-point tensor ({examples}, *, K), this "
                f"{name} gave {given}: pass natural=, a function that computes them from a batch; "
                "for other families of outputs use network_empirical_fisher"
            )
        if s.dim() < 2 or len(s) != examples:
            raise ValueError(
                f"natural parameters must be ({examples}, *, K), with the examples first, got "
                f"{tuple(s.shape)} of this {name}: give a function natural that makes them of a "
                "batch"
            )
        return s.flatten(0, -2)

    def check_dependence(self, parameters: Mapping[str, Tensor], batch: Batch) -> None:
        """Refuses what is computed without these parameters; a derivative may well be 0."""
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
        """The rows of A_n^T J_n of all outputs n, some (r, *shape) at once, for each parameter."""
        s, backward = torch.func.vjp(lambda p: self(p, batch), parameters)[:2]
        for number, factor in enumerate(self.factor(s.detach())):
            for columns in factor.T.split(at_once or len(factor)):
                rows: list[dict[str, Tensor]] = []
                for column in columns:
                    cotangent = torch.zeros_like(s)
                    cotangent[number] = column
                    # One by one: vmap has no way with the memory format of convolutions.
                    rows.append(backward(cotangent)[0])
                yield {name: torch.stack([row[name] for row in rows]) for name in parameters}

    def product(
        self, parameters: dict[str, Tensor], batch: Batch, examples: int, vector: Tensor
    ) -> Tensor:
        """The block of these parameters, times a vector (P,)."""
        parts = vector.split([a.numel() for a in parameters.values()])
        tangents = {
            name: part.view_as(a) for part, (name, a) in zip(parts, parameters.items(), strict=True)
        }
        total = torch.zeros_like(vector)
        pieces = [batch] if self.together else _chunks(batch, examples)
        for piece in pieces:

            def outputs(p: dict[str, Tensor], piece: Batch = piece) -> Tensor:
                return self(p, piece)

            s, backward = torch.func.vjp(outputs, parameters)[:2]
            # J v as the derivative of J^T u by u: torch's forward mode stumbles over the memory
            # format of convolutions.
            transposed = torch.func.vjp(backward, torch.zeros_like(s))[1]
            (moved,) = transposed((tangents,))
            factor = self.factor(s)
            weighted = (factor @ (factor.mT @ moved.unsqueeze(-1))).squeeze(-1)
            (gradients,) = backward(weighted)
            total += torch.cat([gradients[name].flatten() for name in parameters])
        return total / examples


def _largest_eigenvalue(product: Product, like: Tensor) -> float:
    """Of a positive semidefinite matrix given by its products with vectors: Lanczos' iteration.

    Without making vectors orthogonal anew: what rounding loses brings copies of eigenvalues, which
    the largest does not mind.
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
    if family not in get_args(Family):
        raise ValueError(f"family must be one of {', '.join(get_args(Family))}, got {family!r}")
    check_dispersion(family, dispersion)
    if max_size < 0:
        raise ValueError(f"max_size must be at least 0, got {max_size}")
    if outputs_at_once is not None and outputs_at_once < 1:
        raise ValueError(f"outputs_at_once must be at least 1, got {outputs_at_once}")


def _examples(batch: Batch) -> int:
    """The number of examples of a batch."""
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


def _chunks(batch: Batch, examples: int) -> list[Batch]:
    return [
        _take(batch, first, _EXAMPLES_AT_ONCE) for first in range(0, examples, _EXAMPLES_AT_ONCE)
    ]
