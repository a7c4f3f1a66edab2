"""Blocks of the Fisher information against its definition: expectations of scores by example."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from unchanged import unchanged

from ln_zoo.analysis import FisherBlock, layer_blocks, network_empirical_fisher, network_fisher
from ln_zoo.layers import GRU, Conv2d, Linear
from ln_zoo.models import ConvClassifier, MLPClassifier, SequenceClassifier
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm

F64 = torch.float64
N = 3


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=F64)


def score(log_probability: Tensor, parameters: list[Tensor]) -> Tensor:
    gradients = torch.autograd.grad(log_probability, parameters, retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def by_definition(s: Tensor, family: str, phi: float, parameters: list[Tensor]) -> Tensor:
    """Sum over outputs y of P(y) times the outer product of the score, for one example's s (K,)."""
    if family == "gaussian":
        return sum(torch.outer(g, g) / phi for g in (score(unit, parameters) for unit in s))
    log_ps = list(s.log_softmax(0))
    if family == "bernoulli":
        outputs = torch.tensor([*itertools.product((0.0, 1.0), repeat=len(s))], dtype=F64)
        log_ps = [(y * s - nn.functional.softplus(s)).sum() for y in outputs]
    scores = [(log_p.exp().detach(), score(log_p, parameters)) for log_p in log_ps]
    return sum(p * torch.outer(g, g) for p, g in scores)


def of_outputs(
    network: nn.Module, names: list[str], s: Tensor, family: str = "categorical", phi: float = 1
) -> Tensor:
    """For the natural parameters (..., K) of all examples, independent given the inputs."""
    parameters = dict(network.named_parameters())
    chosen = [parameters[name] for name in names]
    return sum(by_definition(row, family, phi, chosen) for row in s.flatten(0, -2)) / N


def expected(
    network: nn.Module, names: list[str], batch: Tensor, family: str = "categorical", phi: float = 1
) -> Tensor:
    """Each example alone."""
    return of_outputs(network, names, torch.cat([*map(network, batch.split(1))]), family, phi)


def assert_blocks(
    blocks: dict[str, FisherBlock],
    sparse: dict[str, FisherBlock],
    wanted: Callable[[list[str]], Tensor],
    rtol: float = 1e-10,
) -> None:
    for name, block in blocks.items():
        matrix = wanted(list(block.parameters))
        close = {"rtol": rtol, "atol": 1e-14 * float(matrix.abs().max())}
        torch.testing.assert_close(block.matrix, matrix, **close)
        assert sparse[name].matrix is None
        largest = float(torch.linalg.eigvalsh(matrix)[-1])
        for found in (block, sparse[name]):
            torch.testing.assert_close(found.diagonal, matrix.diag(), **close)
            assert found.trace == pytest.approx(float(matrix.trace()))
            assert found.largest == pytest.approx(largest, rel=1e-7)


NORMS = [LayerNorm(), BatchNorm(max_steps=4), WeightNorm(), RMSNorm(), Identity()]


def classifier(kind: str, norm: Norm) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "mlp":
        model, size = MLPClassifier(5, [4], 3, norm=norm), (5,)
    elif kind == "conv":
        model, size = ConvClassifier((1, 4, 4), 3, [[2]], 3, norm=norm), (1, 4, 4)
    else:
        model, size = SequenceClassifier(4, 3, 3, cell=kind, norm=norm), (4,)
    model = model.double()
    x = normal(N, *size)
    model(normal(8, *size, seed=1))  # running averages that are not those of the start
    return model.eval(), x


@pytest.mark.parametrize(
    ("kind", "norm"),
    [
        (kind, norm)
        for i, kind in enumerate(["mlp", "conv", "lstm", "gru", "rnn"])
        for j, norm in enumerate(NORMS)
        if (i + j) % 2 == 0
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_blocks_are_expected_outer_products_of_scores(kind: str, norm: Norm) -> None:
    model, x = classifier(kind, norm)
    blocks = network_fisher(model, x, outputs_at_once=2)
    sparse = network_fisher(model, x, max_size=0)
    assert sorted(n for b in blocks.values() for n in b.parameters) == sorted(
        name for name, _ in model.named_parameters()
    )
    assert_blocks(blocks, sparse, lambda names: expected(model, names, x))


@pytest.mark.parametrize(("family", "phi"), [("gaussian", 1), ("gaussian", 0.3), ("bernoulli", 1)])
def test_other_families(family: str, phi: float) -> None:
    model, x = classifier("mlp", LayerNorm())
    for block in network_fisher(model, x, family=family, dispersion=phi).values():
        wanted = expected(model, list(block.parameters), x, family, phi)
        torch.testing.assert_close(block.matrix, wanted, rtol=1e-10, atol=1e-15)


def test_batch_statistics_are_differentiated_through() -> None:
    model, x = classifier("mlp", BatchNorm())
    with unchanged(model):
        blocks = network_fisher(model, x, statistics="batch")
        sparse = network_fisher(model, x, statistics="batch", max_size=0)
    model.train()
    assert_blocks(blocks, sparse, lambda names: of_outputs(model, names, model(x)), rtol=1e-8)


def test_noise_under_batch_statistics_is_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """This model adds noise to states wherever batch statistics are in use."""
    model, x = classifier("rnn", BatchNorm(max_steps=4))
    # Generators of other devices are left alone.
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("all devices seeded"))
    with unchanged(model):
        blocks = network_fisher(model, x, statistics="batch")
        sparse = network_fisher(model, x, statistics="batch", max_size=0)
    for name, block in blocks.items():
        largest = float(torch.linalg.eigvalsh(block.matrix)[-1])
        assert sparse[name].largest == pytest.approx(largest, rel=1e-7)


def test_natural_parameters_of_another_kind() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = Linear(3, 4, norm=LayerNorm(), dtype=F64)
            self.right = nn.Sequential(Conv2d(1, 4, 2, norm=RMSNorm(), dtype=F64), nn.Flatten())
            self.offset = nn.Parameter(normal(4))

    torch.manual_seed(0)
    pair, x, y = Pair(), normal(N, 3), normal(N, 1, 2, 2, seed=1)

    def natural(batch: tuple[Tensor, Tensor]) -> Tensor:
        left, right = batch
        return (pair.left(left) * pair.right(right) + pair.offset).tanh()[:, :2]

    blocks = network_fisher(pair, (x, y), natural, family="gaussian")
    assert list(blocks) == ["", "left", "right.0"]
    for block in blocks.values():
        wanted = of_outputs(pair, list(block.parameters), natural((x, y)), "gaussian")
        torch.testing.assert_close(block.matrix, wanted, rtol=1e-10, atol=1e-15)


class PerStep(nn.Module):
    """Outputs at every step of a sequence (N, T, I)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = GRU(2, 3, norm=LayerNorm(), dtype=F64, batch_first=True)
        self.head = Linear(3, 2, dtype=F64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.gru(inputs)[0])


@pytest.mark.parametrize("family", ["categorical", "bernoulli", "gaussian"])
def test_outputs_at_every_step(family: str) -> None:
    """Independent given the inputs: their matrices add up."""
    model, x = PerStep(), normal(N, 4, 2)
    blocks = network_fisher(model, x, family=family)
    sparse = network_fisher(model, x, family=family, max_size=0, outputs_at_once=1)
    assert_blocks(blocks, sparse, lambda names: expected(model, names, x, family), rtol=1e-9)


def test_mean_over_given_outputs() -> None:
    model, x = classifier("mlp", LayerNorm())
    y = torch.tensor([2, 0, 1])

    def log_likelihood(batch: tuple[Tensor, Tensor]) -> Tensor:
        return -nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    blocks = network_empirical_fisher(model, (x, y), log_likelihood)
    sparse = network_empirical_fisher(model, (x, y), log_likelihood, max_size=0)
    parameters = dict(model.named_parameters())

    def wanted(names: list[str]) -> Tensor:
        chosen = [parameters[name] for name in names]
        scores = [score(value, chosen) for value in log_likelihood((x, y))]
        return sum(torch.outer(g, g) for g in scores) / N

    assert_blocks(blocks, sparse, wanted)


def test_blocks_and_their_parts() -> None:
    model, x = classifier("mlp", LayerNorm())
    block = network_fisher(model, x)["network.1"]
    assert list(block.parameters) == ["network.1.weight", "network.1.bias", "network.1.site.gain"]
    assert block.size == 5 * 4 + 4 + 4
    assert torch.equal(block.part("network.1.bias"), block.matrix[20:24, 20:24])
    mixed = block.part("network.1.site.gain", "network.1.weight")
    assert torch.equal(mixed, block.matrix[24:, :20])
    with pytest.raises(KeyError, match="'bias'"):
        block.part("bias")
    with pytest.raises(ValueError, match=r"28 parameters.*max_size"):
        network_fisher(model, x, max_size=27)["network.1"].part("network.1.bias")
    # A block of one's own, and one without its largest eigenvalue.
    names = ["network.3.bias", "network.1.site.gain"]
    (mine,) = network_fisher(model, x, blocks={"mine": names}).values()
    assert mine.parameters == {"network.3.bias": (3,), "network.1.site.gain": (4,)}
    torch.testing.assert_close(mine.matrix, expected(model, names, x))
    (sparse,) = network_fisher(model, x, blocks={"mine": names}, max_size=0, largest=False).values()
    assert math.isnan(sparse.largest)
    # Each layer is a block.
    network = nn.ModuleDict({"frozen": Linear(2, 2).requires_grad_(False)})
    network["gru"] = GRU(2, 3, num_layers=2, norm=LayerNorm())
    network["wn"] = Linear(2, 2, bias=False, norm=WeightNorm())
    blocks = layer_blocks(network)
    assert list(blocks) == ["gru", "wn"]
    assert blocks["wn"] == ["wn.weight", "wn.site.scale"]
    assert sorted(blocks["gru"]) == sorted(f"gru.{n}" for n, _ in network["gru"].named_parameters())


MLP, MLP_X = classifier("mlp", LayerNorm())
OTHER = copy.deepcopy(MLP)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"family": "poisson"}, "family.*'poisson'"),
        ({"dispersion": 0.0, "family": "gaussian"}, "dispersion.*0.0"),
        ({"dispersion": 2.0}, "dispersion.*categorical.*2.0"),
        ({"max_size": -1}, "max_size.*0.*-1"),
        ({"outputs_at_once": 0}, "outputs_at_once.*1.*0"),
        ({"statistics": "mean"}, "statistics.*'mean'"),
        ({"blocks": {}}, "MLPClassifier.*blocks"),
        ({"blocks": {"a": []}}, "MLPClassifier.*blocks"),
        ({"natural": OTHER}, "MLPClassifier"),
        ({"natural": lambda batch: MLP(batch).detach()}, "MLPClassifier.*detach"),
        ({"natural": torch.no_grad()(lambda batch: MLP(batch))}, "MLPClassifier.*no_grad"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_do_not_fit(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        network_fisher(MLP, MLP_X, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": {"a": ["network.9.bias"]}}, "9"),
        ({"natural": lambda batch: MLP(batch)[0]}, "out of range"),
        ({"natural": lambda batch: [MLP(batch)]}, "list"),
    ],
)
def test_what_torch_refuses(options: dict, words: str) -> None:
    with pytest.raises((AttributeError, IndexError), match=words):
        network_fisher(MLP, MLP_X, **options)


@pytest.mark.parametrize("of", [Tensor.tolist, lambda s: s])
def test_log_likelihoods_and_batches_that_do_not_fit(of) -> None:
    with pytest.raises((RuntimeError, AttributeError), match=r"shape '\[1, 1\]'|view"):
        network_empirical_fisher(MLP, MLP_X, lambda batch: of(MLP(batch)))
    with pytest.raises(ValueError, match=r"\(3, 5\), \(2, 5\)"):
        network_fisher(MLP, (MLP_X, MLP_X[:2]))


def test_a_matrix_of_zeros_is_one() -> None:
    """A softmax that is sure of its class has no curvature left, to the last digit."""
    model, x = classifier("mlp", LayerNorm())
    with torch.no_grad():
        model.network[3].bias[0] += 1e5
    blocks = network_fisher(model, x)
    assert all(not block.matrix.any() for block in blocks.values())
    assert all(block.largest == 0 for block in network_fisher(model, x, max_size=0).values())


def test_the_network_is_left_as_it_was_and_may_be_untrained() -> None:
    model, x = classifier("mlp", LayerNorm())
    names = [name for name, _ in model.named_parameters()]
    wanted = network_fisher(model, x, blocks={"all": names})["all"].matrix
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"MLPClassifier.*requires_grad"):
        network_fisher(model, x)
    found = network_fisher(model, x, blocks={"all": names})["all"].matrix
    torch.testing.assert_close(found, wanted)
    model, x = classifier("conv", BatchNorm())
    model.train()
    with unchanged(model):
        network_fisher(model, x)
        network_fisher(model, x, max_size=0)
    assert all(p.requires_grad for p in model.parameters())
