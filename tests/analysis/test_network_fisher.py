"""Blocks of the Fisher information against its definition: expectations of scores, case by case."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from ln_zoo.analysis import layer_blocks, network_fisher
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
    """Sum over outputs y of P(y) times the outer product of the score, for one case's s (K,)."""
    total = torch.zeros(())
    if family == "categorical":
        for label in range(len(s)):
            g = score(s.log_softmax(0)[label], parameters)
            total = total + s.softmax(0)[label].detach() * torch.outer(g, g)
    elif family == "bernoulli":
        for bits in itertools.product((0.0, 1.0), repeat=len(s)):
            y = torch.tensor(bits, dtype=F64)
            log_p = (y * s - nn.functional.softplus(s)).sum()
            g = score(log_p, parameters)
            total = total + log_p.exp().detach() * torch.outer(g, g)
    else:
        for unit in range(len(s)):
            g = score(s[unit], parameters)
            total = total + torch.outer(g, g) / phi
    return total


def expected(
    network: nn.Module, names: list[str], batch: Tensor, family: str = "categorical", phi: float = 1
) -> Tensor:
    parameters = dict(network.named_parameters())
    chosen = [parameters[name] for name in names]
    cases = [batch[n : n + 1] for n in range(len(batch))]
    return sum(by_definition(network(x)[0], family, phi, chosen) for x in cases) / len(cases)


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


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize("kind", ["mlp", "conv", "lstm", "gru", "rnn"])
def test_blocks_are_expected_outer_products_of_scores(kind: str, norm: Norm) -> None:
    model, x = classifier(kind, norm)
    blocks = network_fisher(model, x, outputs_at_once=2)
    sparse = network_fisher(model, x, max_size=0)
    assert sorted(n for b in blocks.values() for n in b.parameters) == sorted(
        name for name, _ in model.named_parameters()
    )
    for name, block in blocks.items():
        wanted = expected(model, list(block.parameters), x)
        assert block.matrix is not None
        assert sparse[name].matrix is None
        scale = float(wanted.abs().max())
        torch.testing.assert_close(block.matrix, wanted, rtol=1e-10, atol=1e-13 * scale)
        largest = float(torch.linalg.eigvalsh(wanted)[-1])
        for found in (block, sparse[name]):
            torch.testing.assert_close(
                found.diagonal, wanted.diag(), rtol=1e-10, atol=1e-13 * scale
            )
            assert found.trace == pytest.approx(float(wanted.trace()))
            assert found.largest == pytest.approx(largest, rel=1e-7)


@pytest.mark.parametrize(("family", "phi"), [("gaussian", 1), ("gaussian", 0.3), ("bernoulli", 1)])
def test_other_families(family: str, phi: float) -> None:
    model, x = classifier("mlp", LayerNorm())
    for block in network_fisher(model, x, family=family, dispersion=phi).values():
        wanted = expected(model, list(block.parameters), x, family, phi)
        torch.testing.assert_close(block.matrix, wanted, rtol=1e-10, atol=1e-15)


def test_dispersion_divides() -> None:
    model, x = classifier("mlp", LayerNorm())
    one, three = (network_fisher(model, x, family="bernoulli", dispersion=d) for d in (1.0, 3.0))
    for name in one:
        torch.testing.assert_close(one[name].matrix, 3 * three[name].matrix)


def test_batch_statistics_are_differentiated_through() -> None:
    model, x = classifier("mlp", BatchNorm())
    before = copy.deepcopy(model.state_dict())
    blocks = network_fisher(model, x, statistics="batch")
    sparse = network_fisher(model, x, statistics="batch", max_size=0)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    model.train()
    parameters = dict(model.named_parameters())
    for name, block in blocks.items():
        chosen = [parameters[each] for each in block.parameters]
        logits = model(x)
        wanted = sum(by_definition(s, "categorical", 1, chosen) for s in logits) / N
        torch.testing.assert_close(block.matrix, wanted, rtol=1e-8, atol=1e-14)
        largest = float(torch.linalg.eigvalsh(wanted)[-1])
        assert sparse[name].largest == pytest.approx(largest, rel=1e-7)


def test_noise_under_batch_statistics_is_one_draw() -> None:
    """This model adds noise to states wherever batch statistics are in use."""
    model, x = classifier("rnn", BatchNorm(max_steps=4))
    random = torch.get_rng_state()
    blocks = network_fisher(model, x, statistics="batch")
    assert torch.equal(torch.get_rng_state(), random)
    sparse = network_fisher(model, x, statistics="batch", max_size=0)
    for name, block in blocks.items():
        assert sparse[name].largest == pytest.approx(
            float(torch.linalg.eigvalsh(block.matrix)[-1]), rel=1e-7
        )


def test_natural_parameters_of_another_kind() -> None:
    """A function of the network, of a batch of two tensors, with several layers at work."""

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
    parameters = dict(pair.named_parameters())
    for block in blocks.values():
        chosen = [parameters[name] for name in block.parameters]
        s = natural((x, y))
        wanted = sum(by_definition(row, "gaussian", 1, chosen) for row in s) / N
        torch.testing.assert_close(block.matrix, wanted, rtol=1e-10, atol=1e-15)


def test_blocks_of_ones_own() -> None:
    model, x = classifier("mlp", LayerNorm())
    names = ["network.3.bias", "network.1.site.gain"]
    found = network_fisher(model, x, blocks={"mine": names})
    assert list(found) == ["mine"]
    assert found["mine"].parameters == {"network.3.bias": (3,), "network.1.site.gain": (4,)}
    torch.testing.assert_close(found["mine"].matrix, expected(model, names, x))


def test_parts_of_a_block() -> None:
    model, x = classifier("mlp", LayerNorm())
    block = network_fisher(model, x)["network.1"]
    assert list(block.parameters) == ["network.1.weight", "network.1.bias", "network.1.site.gain"]
    assert block.size == 5 * 4 + 4 + 4
    assert torch.equal(block.part("network.1.bias"), block.matrix[20:24, 20:24])
    mixed = block.part("network.1.site.gain", "network.1.weight")
    assert torch.equal(mixed, block.matrix[24:, :20])
    with pytest.raises(ValueError, match=r"no parameter 'bias' in this block: network\.1\.weight"):
        block.part("bias")
    with pytest.raises(ValueError, match="this block of 28 parameters was not kept"):
        network_fisher(model, x, max_size=27)["network.1"].part("network.1.bias")


def test_layers() -> None:
    network = nn.ModuleDict(
        {
            "frozen": Linear(2, 2).requires_grad_(False),
            "gru": GRU(2, 3, num_layers=2, norm=LayerNorm()),
            "wn": Linear(2, 2, bias=False, norm=WeightNorm()),
        }
    )
    blocks = layer_blocks(network)
    assert list(blocks) == ["gru", "wn"]
    assert blocks["wn"] == ["wn.weight", "wn.site.scale"]
    assert sorted(blocks["gru"]) == sorted(f"gru.{n}" for n, _ in network["gru"].named_parameters())


# Claims of the paper (section 5.2) on networks


@pytest.mark.parametrize(
    ("norm", "whole"),
    [(LayerNorm(eps=0.0), True), (WeightNorm(), False), (BatchNorm(eps=0.0), False)],
    ids=lambda value: type(value).__name__ if isinstance(value, Norm) else "",
)
def test_curvature_falls_with_the_square_of_the_weights_length(norm: Norm, whole: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(4, 5, norm=norm)
    network = nn.Sequential(layer, nn.Tanh(), Linear(5, 3)).double()
    x, rows = normal(6, 4), slice(None) if whole else slice(2, 3)
    scale = "0.site.scale" if isinstance(norm, WeightNorm) else "0.site.gain"
    before = network_fisher(network, x, statistics="batch")["0"]
    with torch.no_grad():
        layer.weight[rows] *= 2
    after = network_fisher(network, x, statistics="batch")["0"]

    def unit(part: Tensor, columns: bool) -> Tensor:
        view = part.view(5, 4, *((5, 4) if columns else (5,)))
        return view[rows, :, rows] if columns else view[rows]

    own = [unit(block.part("0.weight"), True) for block in (before, after)]
    torch.testing.assert_close(own[1], own[0] / 4, rtol=1e-9, atol=1e-13)
    for other in ("0.bias", scale):
        mixed = [unit(block.part("0.weight", other), False) for block in (before, after)]
        torch.testing.assert_close(mixed[1], mixed[0] / 2, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(after.part(other), before.part(other), rtol=1e-9, atol=1e-13)


def test_directions_that_normalised_layers_do_not_feel() -> None:
    torch.manual_seed(0)
    layer = Linear(4, 5, norm=LayerNorm(eps=0.0))
    network = nn.Sequential(layer, nn.Tanh(), Linear(5, 3)).double()
    block = network_fisher(network, normal(30, 4))["0"].part("0.weight")
    same = normal(4).expand(5, 4)  # added to every row
    for direction in (layer.weight.detach(), same):
        unit = direction.reshape(-1) / direction.norm()
        assert float((block @ unit).norm()) < 1e-13 * float(block.norm())


# Errors


def test_wrong_arguments() -> None:
    model, x = classifier("mlp", LayerNorm())
    for options, message in (
        ({"family": "poisson"}, "family must be one of categorical, bernoulli, gaussian"),
        ({"dispersion": 0.0, "family": "gaussian"}, "dispersion must be positive, got 0.0"),
        ({"dispersion": 2.0}, "a categorical output has dispersion 1, got 2.0"),
        ({"max_size": -1}, "max_size must be at least 0, got -1"),
        ({"outputs_at_once": 0}, "outputs_at_once must be at least 1, got 0"),
        ({"statistics": "mean"}, "statistics must be 'batch' or 'kept'"),
        ({"blocks": {"a": ["network.9.bias"]}}, "no parameters network.9.bias in this MLPClass"),
    ):
        with pytest.raises(ValueError, match=message):
            network_fisher(model, x, **options)
    with pytest.raises(ValueError, match=r"natural parameters must be \(1, K\).* got \(3,\)"):
        network_fisher(model, x, lambda batch: model(batch)[0])
    with pytest.raises(ValueError, match="as many in each and one at least"):
        network_fisher(model, (x, x[:2]))
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match="do not depend on these parameters"):
        network_fisher(model, x, other)


def test_the_network_is_left_as_it_was() -> None:
    model, x = classifier("conv", BatchNorm())
    model.train()
    before = copy.deepcopy(model.state_dict())
    network_fisher(model, x)
    network_fisher(model, x, max_size=0)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_without_the_largest_eigenvalue() -> None:
    model, x = classifier("mlp", LayerNorm())
    found = network_fisher(model, x, max_size=0, largest=False)
    assert all(str(block.largest) == "nan" for block in found.values())
