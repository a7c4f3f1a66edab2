"""The contract of a recurrent cell."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ln_zoo.analysis.dynamics import perturbation_growth
from ln_zoo.analysis.gradient_flow import gradient_norms
from ln_zoo.analysis.stepping import cpu_seed
from ln_zoo.layers import RecurrentCell, RecurrentLayer, orthogonal_init, without_blocks
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.testing.layer_case import (
    GENERATED_STEPS,
    STEPS,
    TOLERANCES,
    LayerCase,
    assert_same,
    describe,
    outputs_of,
    random_input,
    run,
)


class CellCase(LayerCase):
    """Contract of a recurrent cell; pytest runs every check under every norm of `norms`.

    Shapes, gradients, saving and copying, precisions, packed sequences, layers and directions, the
    layer against its single steps, updates of parameters, projections, recurrent weights in blocks,
    initialisers and analyses. To omit a check, set it to ``None``.

    Attributes:
        layer: the class of layers under test.
        step: the class of its single steps, with the same `ln_zoo.ops.Cell`.
        norms: the norms.
        blocks: number of blocks of the recurrent weight in all checks, or its greatest common
            divisor with the layer's size (mostly 4); default 1.

    Example:
        >>> from ln_zoo.layers import GRU, GRUCell
        >>> class TestGRU(CellCase):
        ...     layer, step = GRU, GRUCell
        >>> TestGRU().test_projects_or_says_why_not()
    """

    layer: ClassVar[type[RecurrentLayer]]
    step: ClassVar[type[RecurrentCell]]
    norms: ClassVar[tuple[Norm, ...]] = (
        Identity(),
        LayerNorm(),
        LayerNorm(per_gate=True),
        RMSNorm(),
        BatchNorm(),
        WeightNorm(),
    )
    norm: Norm = LayerNorm()
    blocks: ClassVar[int] = 1

    def _kinds(self) -> dict[str, type[nn.Module]]:
        found: list[type[nn.Module]] = [self.layer, self.step]
        return {cls.__name__: cls for cls in found}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise each check by norm, and by the classes that it applies to."""
        for name, base in (("layer", RecurrentLayer), ("step", RecurrentCell)):
            cls = getattr(self, name, None)
            if not (isinstance(cls, type) and issubclass(cls, base)):
                pytest.fail(
                    f"{type(self).__name__}: set the class attribute {name} to a subclass of "
                    f"ln_zoo.layers.{base.__name__}, got {cls!r}"
                )
        super().pytest_generate_tests(metafunc)
        names = [type(norm).__name__ for norm in self.norms]
        metafunc.parametrize("under", self.norms, ids=names)

    @pytest.fixture(autouse=True)
    def _seed(self, under: Norm) -> Iterator[None]:
        self.norm = under
        with cpu_seed(0):
            yield

    def _make(self, layer: str, sizes: tuple[int, int] = (5, 4), **options: Any) -> nn.Module:
        options.setdefault("blocks", math.gcd(self.blocks, sizes[1]))
        return super()._make(layer, sizes, **options)

    # The cell

    def test_layer_and_step_have_one_cell(self) -> None:
        assert self.layer.cell is self.step.cell, (
            f"{self.layer.__name__} and {self.step.__name__} have different cells: give both the "
            "same ln_zoo.ops.Cell"
        )
        again = pickle.loads(pickle.dumps(self.layer.cell))
        assert again == self.layer.cell, f"{self.layer.cell.name}: a pickled copy differs from it"

    def test_projects_or_says_why_not(self) -> None:
        name = self.layer.__name__
        if not self.layer.cell.projects or self.blocks > 1:
            # Layers with explicit arguments, such as GRU, lack this one.
            with pytest.raises((ValueError, TypeError), match=r"cannot project|proj_size"):
                self._make(name, proj_size=2)
            return
        module = self._trained(name, proj_size=2, num_layers=2, bidirectional=True)
        output, h, *others = run(module, random_input(name))
        assert (output.shape, h.shape) == ((4, STEPS, 4), (4, 4, 2)), f"{describe(module)}: {name}"
        assert all(state.shape == (4, 4, 4) for state in others)

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_blocks_are_a_block_diagonal_weight(self, mode: str) -> None:
        for name in self._kinds():
            module = self._trained(name, blocks=2).train(mode == "training")
            full, x = without_blocks(module), random_input(name)
            where = f"{describe(module)}: {name} with blocks=2, against a block-diagonal weight"
            for what, found, expected in zip(
                ("outputs", "gradients", "second derivatives"),
                _derivatives(module, x),
                _derivatives(full, x),
                strict=True,
            ):
                for i, (one, two) in enumerate(zip(found, expected, strict=True)):
                    if two.dim() == one.dim() - 1:  # of a recurrent weight
                        two = _on_the_diagonal(two, blocks=2)
                    if two.abs().max() > 1e-9:
                        assert_same(one, two, f"{where}: {what}, {i}", 1e-9)

    def test_layers_and_directions_are_single_layers(self) -> None:
        name = self.layer.__name__
        module = self._trained(name, num_layers=2, bidirectional=True).eval()
        x = random_input(name)
        finals, output = [], x
        for layer in range(2):
            parts = []
            for suffix in (f"l{layer}", f"l{layer}_reverse"):
                single = self._make(name, (output.shape[-1], 4), dtype=torch.float64).eval()
                ends = re.compile(rf"(?<=[._]){suffix}(?=$|\.)")
                own = {key: a for key, a in module.state_dict().items() if ends.search(key)}
                single.load_state_dict({ends.sub("l0", key): a for key, a in own.items()})
                back = suffix.endswith("reverse")
                part, *states = run(single, output.flip(1) if back else output)
                parts.append(part.flip(1) if back else part)
                finals.append(states)
            output = torch.cat(parts, dim=-1)
        expected = [output, *(torch.cat(states) for states in zip(*finals, strict=True))]
        for one, two in zip(run(module, x), expected, strict=True):
            assert_same(one, two, f"{describe(module)}: two layers against four single ones")

    def test_begins_where_it_left_off(self) -> None:
        if self.norm.per_timestep:
            pytest.skip("per_timestep: later steps have statistics of their own")
        name = self.layer.__name__
        module: Any = self._trained(name).eval()
        x = random_input(name, steps=6)
        whole, *final = outputs_of(module, x)
        first, states = module(x[:, :2])
        second, states = module(x[:, 2:], states)
        assert_same(torch.cat([first, second], 1), whole, f"{describe(module)}: cut in two")
        states = states if isinstance(states, tuple) else (states,)
        for one, two in zip(states, final, strict=True):
            assert_same(one, two, f"{describe(module)}: cut in two, final state")

    def test_follows_updates_of_its_parameters(self) -> None:
        """In float32: a layer remembers how its calls run, and the copy of `run` does not."""
        name = self.layer.__name__
        module = self._trained(name, dtype=torch.float32).eval()
        x = random_input(name, steps=GENERATED_STEPS, dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in module.named_parameters():
                for _ in range(2):
                    outputs_of(module, x)
                parameter.add_(0.1 * torch.randn_like(parameter))
                where = f"{describe(module)}: after an update of {key}, against a copy"
                for one, two in zip(outputs_of(module, x), run(module, x), strict=True):
                    assert_same(one, two, where, TOLERANCES["generated"])

    def test_recomputed_steps_are_the_same(self) -> None:
        name = self.layer.__name__
        if self.norm.per_timestep:
            with pytest.raises(ValueError, match="recompute"):
                self._make(name, recompute=2)
            return
        module = self._trained(name, bidirectional=True)
        again = self._make(name, bidirectional=True, recompute=2, dtype=torch.float64)
        again.load_state_dict(module.state_dict())
        x = random_input(name, steps=5)
        found = (itertools.chain(*_derivatives(each, x)) for each in (module, again))
        for one, two in zip(*found, strict=True):
            assert_same(two, one, f"{describe(again)}: recomputed in pieces of two steps")

    def test_resets_are_pieces_apart(self) -> None:
        name = self.layer.__name__
        module: Any = self._trained(name, bidirectional=True).eval()
        x = random_input(name, steps=6)
        reset = torch.zeros(4, 6, dtype=torch.bool)
        reset[1, [2, 5]] = True
        output = module(x, reset=reset)[0]
        for begin, end in ((0, 2), (2, 5), (5, 6)):
            piece = module(x[1, begin:end])[0]
            where = (
                f"{describe(module)}: steps {begin} to {end} between resets, against those alone"
            )
            assert_same(output[1, begin:end], piece, where)

    def test_noise_is_drawn_in_training_alone(self) -> None:
        name = self.layer.__name__
        options: dict[str, Any] = {"zoneout": 0.3, "weight_dropout": 0.4}
        if self.layer.cell.drops:
            options["recurrent_dropout"] = 0.3
        else:
            with pytest.raises(ValueError, match="recurrent_dropout"):
                self._make(name, recurrent_dropout=0.3)
        for option, p in options.items():
            module = self._trained(name, **{option: p})
            x = random_input(name)
            for mode in (True, False):
                module.train(mode)
                one, two = (run(module, x)[0] for _ in range(2))
                assert torch.equal(one, two) != mode, (
                    f"{describe(module)}, {option}={p}: two runs on one input "
                    f"{'are the same' if mode else 'differ'}"
                )

    def test_without_biases(self) -> None:
        for name in self._kinds():
            module = self._make(name, bias=False, dtype=torch.float64)
            assert not any("bias" in key for key in module.state_dict())
            zeros = self._make(name, dtype=torch.float64)
            zeros.load_state_dict(module.state_dict(), strict=False)
            with torch.no_grad():
                for key, parameter in zeros.named_parameters():
                    if "bias" in key:
                        parameter.zero_()
            x = random_input(name)
            where = f"{describe(module)}: without biases, against biases of 0"
            assert_same(run(module, x)[0], run(zeros, x)[0], where)

    def test_initialisers_find_their_rows(self) -> None:
        module: Any = self._make(self.layer.__name__, num_layers=2)
        orthogonal_init(module, forget_bias=2.0)
        weight, units = module.weight_hh_l1, 4 // module.blocks
        for gate in range(module.cell.gates):
            for block in [weight] if module.blocks == 1 else weight:
                rows = block.split(units)[gate]
                assert torch.equal(rows, torch.eye(units)) == (gate in module.cell.candidates)
            bias = module.bias_ih_l1.split(4)[gate]
            assert (bias == (2.0 if gate in module.cell.forget else 0.0)).all()

    def test_analyses_take_it(self) -> None:
        name = self.layer.__name__
        layer: Any = self._trained(name)
        x = torch.randn(5, 4, 5, dtype=torch.float64)
        where = f"{describe(layer)}: "
        norms = gradient_norms(layer, x)
        assert norms.isfinite().all(), f"{where}gradient_norms {norms}"
        growth = perturbation_growth(layer, x)
        assert growth.isfinite().all(), f"{where}perturbation_growth {growth}"


def _derivatives(module: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs; gradients of input and parameters; those of the input's gradient, squared."""
    sources = [x.clone().requires_grad_(), *module.parameters()]
    outputs = run(module, sources[0])
    loss = sum((a.sin().sum() for a in outputs), x.new_zeros(()))
    options: Any = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(loss, sources, create_graph=True, **options)
    second = torch.autograd.grad(first[0].square().sum(), sources, **options)
    return [*outputs], [*first], [*second]


def _on_the_diagonal(weight: Tensor, blocks: int) -> Tensor:
    """The blocks on the diagonal of each gate of a weight (G, H): (B, G / B, H / B)."""
    units = weight.shape[1] // blocks
    gates = weight.split(weight.shape[1])
    of_block = [slice(k * units, (k + 1) * units) for k in range(blocks)]
    return torch.stack([torch.cat([gate[part, part] for gate in gates]) for part in of_block])
