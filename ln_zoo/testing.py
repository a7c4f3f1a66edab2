"""Test cases to subclass: name what is under test, and pytest runs every check on it.
`CellCase` is for recurrent cells, `DataCase` for datasets, `CallbackCase` for callbacks. `NormCase`
is for norms, and is used like this:

    from dataclasses import dataclass

    import torch
    from ln_zoo.norms import Norm
    from ln_zoo.testing import NormCase


    @dataclass(frozen=True)
    class MyNorm(Norm):
        eps: float = 1e-5
        invariances = frozenset(
            {"weight_matrix_rescaling", "dataset_rescaling", "example_rescaling"}
        )

        def init_params(self, site):
            site.add_affine(gain=1.0)

        def normalize(self, site, a, step=None):
            return site.affine(a * torch.rsqrt(site.mean(a.square()) + self.eps))


    class TestMyNorm(NormCase):
        norm = MyNorm()

Needs pytest: ``pip install 'ln-zoo[test]'``.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ln_zoo.analysis.dynamics import perturbation_growth
from ln_zoo.analysis.gradient_flow import gradient_norms
from ln_zoo.analysis.invariance import INVARIANT, VARIANT, invariance_table
from ln_zoo.analysis.stepping import cpu_seed
from ln_zoo.layers import (
    GRU,
    LSTM,
    RNN,
    Conv2d,
    GRUCell,
    Linear,
    LSTMCell,
    RecurrentCell,
    RecurrentLayer,
    RNNCell,
    orthogonal_init,
)
from ln_zoo.norms import (
    INVARIANCES,
    BatchNorm,
    Identity,
    LayerNorm,
    Norm,
    RMSNorm,
    Site,
    WeightNorm,
    from_config,
    to_config,
)
from ln_zoo.ops.norm_records import RowNorm, StepNorm

try:
    import pytest
except ImportError as error:
    raise ImportError("ln_zoo.testing needs pytest: pip install 'ln-zoo[test]'") from error

#: Maximum difference relative to the largest element.
TOLERANCES: dict[str, float] = {
    "float64": 1e-11,  # the same terms, summed in another order
    "float16": 1e-2,  # against float32, after a few time steps
    "bfloat16": 6e-2,
    "autocast": 6e-2,  # matrix products in bfloat16, against float32
    "invariant": INVARIANT,  # maximum change if Table 1 says invariant (float64, eps = 0)
    "variant": VARIANT,  # minimum change otherwise
}

_KINDS: dict[str, type[nn.Module]] = {
    cls.__name__: cls for cls in (Linear, Conv2d, LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell)
}
#: Layers with normalised sums by class name.
LAYERS: tuple[str, ...] = tuple(_KINDS)
_STEPS = 3
_POSITIONS = (4, 3)


def invariance_deviations(norm: Norm) -> dict[str, float]:
    """The paper's Table 1 for a norm: deviation of a layer's output under each map.

    From `ln_zoo.analysis.invariance_table`, with ``eps = 0`` if the norm has that field. Batch
    statistics are recomputed after the map; one example is also rescaled with frozen statistics
    (evaluation mode).

    Returns:
        For each name of `ln_zoo.norms.INVARIANCES`, the largest change of the output, divided by
        its spread over examples; below 1e-12 if the layer is invariant.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> deviations = invariance_deviations(LayerNorm())
        >>> [name for name, deviation in deviations.items() if deviation > 1e-3]
        ['weight_vector_rescaling', 'dataset_recentering']
    """
    rows = invariance_table([norm], always_frozen=True).rows
    found = {name: cell.deviation for name, cell in rows[0].cells.items()}
    found["example_rescaling"] = max(row.cells["example_rescaling"].deviation for row in rows)
    return found


def __getattr__(name: str) -> Any:
    """Import `DataCase` and `CallbackCase` on first use, since they need Lightning."""
    if name in ("DataCase", "CallbackCase"):
        from ln_zoo import testing_cases

        return getattr(testing_cases, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _LayerCase:
    """Checks of one norm in several layers, shared by both test cases."""

    norm: Norm

    def _kinds(self) -> dict[str, type[nn.Module]]:
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise each check by the layers that it applies to."""
        if metafunc.function.__module__ != __name__:
            return  # a subclass's own test
        kinds = self._kinds()
        recurrent = [name for name, cls in kinds.items() if issubclass(cls, RecurrentLayer)]
        for argument, names in (("layer", list(kinds)), ("recurrent", recurrent)):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, names)

    # Shapes

    @pytest.mark.parametrize("sizes", [(5, 4), (3, 7), (1, 1)])
    def test_keeps_shapes(self, layer: str, sizes: tuple[int, int]) -> None:
        module = self._make(layer, sizes=sizes)
        inputs, features = sizes
        examples: list[tuple[tuple[int, ...], tuple[int, ...]]] = {
            "Linear": [((), ()), ((1,), (1,)), ((4,), (4,)), ((2, 3), (2, 3))],
            "Conv2d": [((), ()), ((1,), (1,)), ((4,), (4,))],
        }.get(layer, [((1,), (1,)), ((2, 1), (2, 1)), ((1, 3), (1, 3)), ((4, 5), (4, 5))])
        for leading, expected in examples:
            place = _POSITIONS if layer == "Conv2d" else ()
            x = torch.randn(*leading, inputs, *place)
            training = [] if self.norm.batch_dependent and leading[:1] != (4,) else [True]
            for mode in [*training, False]:
                output = _run(module.train(mode), x)[0]
                assert output.shape == (*expected, features, *place), (
                    f"{_where(module)}: input {tuple(x.shape)} gave {tuple(output.shape)}, "
                    f"not {(*expected, features, *place)}"
                )

    def test_unbatched_equals_a_batch_of_one(self, layer: str) -> None:
        module = self._trained(layer)
        x = _input(layer, examples=1)
        for mode in [False] if self.norm.batch_dependent else [False, True]:
            module.train(mode)
            batched = _run(module, x)[0][0]
            _assert_same(_run(module, x[0])[0], batched, f"{_where(module)}: unbatched input")

    # Gradients

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_gradients_are_those_of_finite_differences(self, layer: str, mode: str) -> None:
        module = self._trained(layer, sizes=(2, 3)).train(mode == "training")
        x = _input(layer, examples=3, sizes=(2, 3)).requires_grad_()

        # gradcheck perturbs tensors in place, so the module sees the changes.
        def function(*_: Tensor) -> tuple[Tensor, ...]:
            return _run(module, x)

        def right(*tensors: Tensor) -> bool:
            return torch.autograd.gradcheck(
                function, tensors, fast_mode=True, raise_exception=False
            )

        named = {"input": x, **dict(module.named_parameters())}
        if not right(*named.values()):
            wrong = [name for name, tensor in named.items() if not right(tensor)]
            pytest.fail(
                f"{_where(module)}: the gradient of {' and '.join(wrong) or 'all of them together'}"
                " is not that of finite differences"
            )

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_gradients_stay_finite_where_statistics_degenerate(self, layer: str, mode: str) -> None:
        shape = _input(layer).shape
        inputs = {
            "all inputs 0": torch.zeros(shape),
            "all inputs equal": torch.ones(shape),
            "all examples equal": torch.randn(1, *shape[1:]).expand(shape),
        }
        for what, x in inputs.items():
            module = self._make(layer).train(mode == "training")
            x = x.clone().requires_grad_()
            output = _run(module, x)[0]
            (output * torch.randn_like(output)).sum().backward()
            for name, tensor in [("input", x), *module.named_parameters()]:
                assert tensor.grad is None or torch.isfinite(tensor.grad).all(), (
                    f"{_where(module)}, {what}: the gradient of {name} is not finite; "
                    "add an eps inside the root"
                )
            assert torch.isfinite(output).all(), f"{_where(module)}, {what}: output not finite"

    # Saving and copying

    def test_state_dict_round_trip(self, layer: str) -> None:
        module = self._trained(layer)
        buffer = io.BytesIO()
        torch.save(module.state_dict(), buffer)
        buffer.seek(0)
        fresh = self._make(layer, dtype=torch.float64)
        fresh.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
        self._assert_equal_behaviour(fresh, module, "after load_state_dict")

    def test_deepcopy_and_pickle(self, layer: str) -> None:
        module = self._trained(layer)
        x = _input(layer)
        # Copies are taken after a backward pass too: averaging callbacks do so.
        _run(module, x)[0].sum().backward()
        for what, again in [
            ("a deep copy", copy.deepcopy(module)),
            ("a pickled copy", pickle.loads(pickle.dumps(module))),
        ]:
            self._assert_equal_behaviour(again, module, f"of {what}")
            shared = {id(t) for t in module.state_dict(keep_vars=True).values()}
            assert not shared & {id(t) for t in again.state_dict(keep_vars=True).values()}, (
                f"{_where(module)}: {what} shares tensors with the original"
            )

    def test_evaluation_changes_nothing(self, layer: str) -> None:
        module = self._trained(layer).eval()
        before = copy.deepcopy(module.state_dict())
        x = _input(layer)
        for one, two in zip(_outputs(module, x), _outputs(module, x), strict=True):
            assert torch.equal(one, two), f"{_where(module)}: two runs on one input differ"
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name]), (
                f"{_where(module)}: evaluation changed {name}; test site.training first"
            )

    # Declared facts

    def test_evaluation_is_not_batch_dependent(self, layer: str) -> None:
        assert self._influence(layer, training=False) == 0, (
            f"{layer}(norm={self.norm!r}): in evaluation mode one example's output depends on "
            "another's input; use running statistics where site.training is False"
        )

    # Recurrent layers

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_packed_examples_equal_examples_alone(self, recurrent: str, mode: str) -> None:
        if mode == "training" and self.norm.batch_dependent:
            pytest.skip("batch_dependent: in training an example alone has other statistics")
        module = self._trained(recurrent, bidirectional=True, num_layers=2)
        module.train(mode == "training")
        lengths = [2, 4, 1]
        x = torch.randn(3, 4, 5, dtype=torch.float64)
        packed = pack_padded_sequence(
            x, torch.tensor(lengths), batch_first=True, enforce_sorted=False
        )
        output, *states = _outputs(module, packed)
        for example, length in enumerate(lengths):
            alone, *alone_states = _outputs(module, x[example : example + 1, :length])
            where = (
                f"{_where(module)}: example {example} of a packed batch against the example alone"
            )
            _assert_same(output[example, :length], alone[0], where)
            assert not output[example, length:].any(), f"{where}: padding is not 0"
            for packed_state, state in zip(states, alone_states, strict=True):
                _assert_same(packed_state[:, example], state[:, 0], f"{where}, final state")

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_layers_equal_their_cells_step_by_step(self, recurrent: str, mode: str) -> None:
        module = self._trained(recurrent).train(mode == "training")
        cell = self._make(self._step_of(recurrent), dtype=torch.float64).train(module.training)
        state = {
            name.replace("sites.l0.", "sites.").replace("_l0", ""): value
            for name, value in module.state_dict().items()
        }
        cell.load_state_dict(state, strict=True)
        x = _input(recurrent)
        for ours, theirs in zip(_run(module, x), _run(cell, x), strict=True):
            _assert_same(ours, theirs, f"{_where(module)}: the whole sequence against its cell")

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_fast_path_equals_the_generic_scan(
        self, recurrent: str, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = self._trained(recurrent, bidirectional=True).train(mode == "training")
        x = _input(recurrent, steps=7).requires_grad_()
        wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
        names = ["input", *(n for n, p in module.named_parameters() if p.requires_grad)]
        results = []
        for switch in ("1", "0"):
            monkeypatch.setenv("LN_ZOO_KERNELS", switch)
            outputs = _run(module, x)
            torch.default_generator.manual_seed(1)
            loss = sum(((out * torch.randn_like(out)).sum() for out in outputs), x.new_zeros(()))
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            results.append((outputs, gradients))
        (fast, fast_gradients), (scan, scan_gradients) = results
        where = f"{_where(module)}: the fast path against the generic scan"
        for one, two in zip(fast, scan, strict=True):
            _assert_same(one, two, where)
        for name, one, two in zip(names, fast_gradients, scan_gradients, strict=True):
            _assert_same(one, two, f"{where}, gradient of {name}")

    # Precision and devices

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision(self, layer: str, dtype: torch.dtype) -> None:
        half = self._trained(layer, dtype=torch.float32).to(dtype)
        for name, buffer in half.named_buffers():
            assert buffer.dtype not in (torch.float16, torch.bfloat16), (
                f"{_where(half)}: buffer {name} became {buffer.dtype}; use site.add_buffer, which "
                "keeps running statistics in float32"
            )
        x = _input(layer, dtype=dtype)
        single = copy.deepcopy(half).float()
        for mode in (True, False):
            outputs = _run(half.train(mode), x)
            for out, exact in zip(outputs, _run(single.train(mode), x.float()), strict=True):
                where = f"{_where(half)}: {dtype} against float32"
                assert out.dtype == dtype, f"{where}: the output is {out.dtype}"
                _assert_same(out, exact, where, TOLERANCES[str(dtype).removeprefix("torch.")])

    def test_float64_stays_float64(self, layer: str) -> None:
        module = self._trained(layer)
        for name, tensor in module.state_dict().items():
            assert not tensor.is_floating_point() or tensor.dtype == torch.float64, (
                f"{_where(module)}: {name} is {tensor.dtype} in a float64 layer"
            )
        narrow = copy.deepcopy(module).float()
        for mode in (True, False):
            outputs = _run(module.train(mode), _input(layer))
            assert all(out.dtype == torch.float64 for out in outputs), (
                f"{_where(module)}: float64 input gave {[out.dtype for out in outputs]}"
            )
            outputs = _run(narrow.train(mode), _input(layer, dtype=torch.float32))
            assert all(out.dtype == torch.float32 for out in outputs), (
                f"{_where(module)}: float32 input gave {[out.dtype for out in outputs]}"
            )

    def test_autocast(self, layer: str) -> None:
        module = self._trained(layer, dtype=torch.float32)
        x = _input(layer, dtype=torch.float32)
        for mode in (True, False):
            module.train(mode).zero_grad()
            exact = _run(module, x)
            with torch.autocast("cpu", torch.bfloat16):
                outputs = _run(module, x)
            where = f"{_where(module)}: under autocast"
            for out, wide in zip(outputs, exact, strict=True):
                _assert_same(out, wide, f"{where} against float32", TOLERANCES["autocast"])
            outputs[0].float().square().sum().backward()
            for name, parameter in module.named_parameters():
                gradient = parameter.grad
                assert gradient is None or torch.isfinite(gradient).all(), (
                    f"{where}: the gradient of {name} is not finite"
                )

    def test_device_and_dtype_reach_the_norm(self, layer: str) -> None:
        module = self._make(layer, device="meta", dtype=torch.float64)
        for name, tensor in module.state_dict().items():
            assert tensor.device.type == "meta", (
                f"{_where(module)}: {name} is on {tensor.device}, the layer on meta; make tensors "
                "with site.add_parameter from existing tensors, or with site.add_buffer"
            )

    # Helpers of the checks

    def _make(self, layer: str, sizes: tuple[int, int] = (5, 4), **options: Any) -> nn.Module:
        """A layer by name; sequences are batch first, images keep their size."""
        cls: Any = self._kinds()[layer]
        if issubclass(cls, Conv2d):
            options |= {"kernel_size": 3, "padding": 1, "positions": _POSITIONS}
        if issubclass(cls, RecurrentLayer):
            options["batch_first"] = True
        return cls(*sizes, norm=self.norm, **options)

    def _step_of(self, recurrent: str) -> str:
        """Class name of a layer's cell; skips if no cell is under test."""
        kinds = self._kinds()
        whole: Any = kinds[recurrent]
        for name, cls in kinds.items():
            if issubclass(cls, RecurrentCell) and cls.cell is whole.cell:
                return name
        pytest.skip(f"no class of single steps of {recurrent} is under test")

    def _trained(self, layer: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
        """A layer with random gains and shifts that has seen two training batches."""
        module = _randomised(self._make(layer, dtype=dtype, **options))
        sizes = options.get("sizes", (5, 4))
        with torch.no_grad():
            for _ in range(2):
                _outputs(module, _input(layer, dtype=dtype, sizes=sizes))
        return module

    def _influence(self, layer: str, training: bool) -> float:
        """Largest gradient of one example's output with respect to another's input."""
        module = self._trained(layer).train(training)
        x = _input(layer).requires_grad_()
        output = _run(module, x)[0][0]
        (gradient,) = torch.autograd.grad((output * torch.randn_like(output)).sum(), x)
        assert gradient[0].any(), (
            f"{_where(module)}: an example's output does not depend on its input"
        )
        return gradient[1:].abs().max().item()

    def _assert_equal_behaviour(self, one: nn.Module, other: nn.Module, what: str) -> None:
        x = _input(type(other).__name__)
        for mode in (True, False):
            pairs = zip(_run(one.train(mode), x), _run(other.train(mode), x), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (
                f"{_where(other)}: outputs {what} differ from the original's"
            )


class NormCase(_LayerCase):
    """Contract of a norm; pytest runs every check.

    The checks run the norm in `Linear`, `Conv2d`, `LSTM`, `GRU`, `RNN` and the cells: shapes,
    gradients, saving and copying, precisions, packed sequences, kernels against the generic loop,
    and the declarations `Norm.batch_dependent`, `Norm.per_timestep`, `Norm.invariances` and
    `Norm.to_spec` against the computation. A check that does not apply is skipped with a reason. To
    omit a check, set it to ``None``.

    Attributes:
        norm: the normalisation under test.
        layers: names of the layers, a subset of `LAYERS`. Default: all. Name fewer for a norm that
            differs from another, tested norm in these layers only.

    Example:
        >>> from ln_zoo.norms import RMSNorm
        >>> class TestRMSNorm(NormCase):
        ...     norm = RMSNorm(eps=1e-6)
        >>> TestRMSNorm().test_batch_dependence_as_declared()
    """

    norm: Norm
    layers: ClassVar[tuple[str, ...]] = LAYERS

    def _kinds(self) -> dict[str, type[nn.Module]]:
        return {name: cls for name, cls in _KINDS.items() if name in self.layers}

    @pytest.fixture(autouse=True)
    def _seed(self) -> Iterator[None]:
        if not isinstance(getattr(self, "norm", None), Norm):
            pytest.fail(
                f"{type(self).__name__}: set the class attribute norm to the norm under test, "
                f"an instance of a subclass of ln_zoo.norms.Norm: norm = MyNorm()"
            )
        if unknown := set(self.layers) - set(LAYERS):
            pytest.fail(
                f"{type(self).__name__}: layers has {', '.join(map(repr, sorted(unknown)))}; "
                f"known are {', '.join(LAYERS)}"
            )
        with cpu_seed(0):
            yield

    # The norm as a value

    def test_is_a_frozen_value(self) -> None:
        norm, cls = self.norm, type(self.norm)
        assert getattr(getattr(cls, "__dataclass_params__", None), "frozen", False), (
            f"make {cls.__name__} a frozen dataclass (@dataclass(frozen=True)): norms are "
            "shared by layers, compared, and stored as plain values"
        )
        try:
            hash(norm)
        except TypeError as error:
            pytest.fail(f"{norm!r} cannot be hashed ({error}): use tuples, strings and numbers")
        again = copy.deepcopy(norm)
        assert (again, hash(again)) == (norm, hash(norm)), (
            f"a copy of {norm!r} differs from it: its fields must be plain values"
        )

    def test_config_round_trip(self) -> None:
        try:
            text = json.dumps(to_config(self.norm))
        except TypeError as error:
            pytest.fail(f"{self.norm!r} must be made of plain values to be stored: {error}")
        try:
            again = from_config(json.loads(text))
        except ValueError as error:
            pytest.fail(f"{text} was stored and cannot be read back: {error}")
        assert again == self.norm, f"stored as {text}, {self.norm!r} came back as {again!r}"

    def test_prints_itself(self) -> None:
        text = repr(self.norm)
        for name in _fields(self.norm):
            assert f"{name}={getattr(self.norm, name)!r}" in text, (
                f"the repr {text!r} does not show {name}"
            )
        assert type(self.norm).__name__ in text, f"the repr {text!r} does not name the class"
        assert text in repr(Linear(3, 2, norm=self.norm)), "a layer's repr lacks its norm's"

    # Declared facts

    def test_batch_dependence_as_declared(self) -> None:
        found = {layer: self._influence(layer, training=True) for layer in self.layers}
        if self.norm.batch_dependent:
            assert max(found.values()) > 0, (
                f"{self.norm!r} declares batch_dependent = True, but in training no example's "
                "output has a gradient with respect to another example's input"
            )
        else:
            mixing = [layer for layer, influence in found.items() if influence > 0]
            assert not mixing, (
                f"{self.norm!r} declares batch_dependent = False, but in training one example's "
                f"output depends on another's input in {', '.join(mixing)}"
            )

    def test_reads_step_as_declared(self) -> None:
        site = _randomised(Site(self.norm, "recurrent", 6, recurrent=True, dtype=torch.float64))
        for step in range(4):
            site((step + 1) * torch.randn(5, 6, dtype=torch.float64) + step, step)
        a = torch.randn(5, 6, dtype=torch.float64)
        differ = {
            mode: any(
                not torch.equal(_twin(site).train(mode)(a, 0), _twin(site).train(mode)(a, step))
                for step in range(1, 4)
            )
            for mode in (True, False)
        }
        if self.norm.per_timestep:
            assert any(differ.values()), (
                f"{self.norm!r} declares per_timestep = True, but gives the same result at steps "
                "0 to 3: declare False, and layers normalise inputs of all steps at once"
            )
        else:
            assert not any(differ.values()), (
                f"{self.norm!r} gives different results at different steps: declare "
                "per_timestep = True, or recurrent layers will not pass every step"
            )

    def test_invariances_are_known_names(self) -> None:
        unknown = set(self.norm.invariances or ()) - set(INVARIANCES)
        assert not unknown, f"{sorted(unknown)} are not among {', '.join(INVARIANCES)}"

    @pytest.mark.parametrize("name", INVARIANCES)
    def test_invariance_as_declared(self, name: str) -> None:
        if self.norm.invariances is None:
            pytest.skip(f"{type(self.norm).__name__} does not state its invariances")
        deviation = invariance_deviations(self.norm)[name]
        if name in self.norm.invariances:
            assert deviation <= TOLERANCES["invariant"], (
                f"{self.norm!r} declares {name}, but it moves a layer's output by {deviation:.1e} "
                f"of its spread (float64, eps = 0; allowed: {TOLERANCES['invariant']:.0e})"
            )
        else:
            assert deviation > TOLERANCES["variant"], (
                f"{self.norm!r} does not declare {name}, but it moves a layer's output by only "
                f"{deviation:.1e} of its spread (float64, eps = 0): add {name!r} to invariances"
            )

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_describe_agrees_with_sums(self, mode: str) -> None:
        sites = [
            Site(self.norm, "input", 8, dtype=torch.float64, recurrent=True),
            Site(self.norm, "recurrent", 9, groups=(6, 3), dtype=torch.float64, recurrent=True),
            Site(self.norm, "cell", 4, own_shift=True, dtype=torch.float64, recurrent=True),
        ]
        described = 0
        for site in map(_randomised, sites):
            a = torch.randn(5, site.features, dtype=torch.float64)
            site(a, 0)
            site.train(mode == "training")
            record = site.to_spec()
            if record is None:
                continue
            described += 1
            a = (2 * torch.randn_like(a) + 1).requires_grad_()
            wanted = [a, *site.parameters()]
            head = torch.randn_like(a)
            where = f"{self.norm!r} at {site.role!r}, {mode}: what to_spec() says"
            twin = _twin(site)
            plain, own = _by_record(record, a), twin(a, 0)
            _assert_same(plain, own, f"{where} differs from normalize()")
            # The record updates running statistics as the norm does.
            for name, buffer in twin.named_buffers():
                updated = site.get_buffer(name).double()
                _assert_same(updated, buffer.double(), f"{where} leaves another {name}")
            gradients = [
                torch.autograd.grad(
                    (out * head).sum(), wanted, allow_unused=True, materialize_grads=True
                )
                for out in (plain, own)
            ]
            for one, two in zip(*gradients, strict=True):
                _assert_same(one, two, f"{where} has other gradients than normalize()")
        if not described:
            pytest.skip("to_spec() is None at every site: only normalize() knows, no kernel runs")

    # Precision and devices

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_sums_keep_shape_and_precision(self, dtype: torch.dtype) -> None:
        sites = [
            (Site(self.norm, "sum", 6, dtype=dtype), (4, 6)),
            (Site(self.norm, "sum", 6, dtype=dtype), (4, 3, 6)),
            (Site(self.norm, "sum", 6, axis=1, positions=(3, 2), dtype=dtype), (4, 6, 3, 2)),
            (Site(self.norm, "input", 6, groups=(4, 2), recurrent=True, dtype=dtype), (4, 6)),
            (Site(self.norm, "cell", 6, recurrent=True, own_shift=True, dtype=dtype), (4, 6)),
        ]
        for site, shape in sites:
            for mode in (True, False):
                a = torch.randn(shape, dtype=dtype)
                out = site.train(mode)(a, 0 if site.recurrent else None)
                assert (out.shape, out.dtype) == (a.shape, a.dtype), (
                    f"{site}: summed inputs of shape {tuple(a.shape)} in {a.dtype} came back as "
                    f"{tuple(out.shape)} in {out.dtype}"
                )

    def test_compiled_equals_eager(self) -> None:
        if "Linear" not in self.layers:
            pytest.skip("layers has no Linear, which is what is compiled here")
        torch.compiler.reset()
        module = self._trained("Linear")
        x = _input("Linear").requires_grad_()
        for mode in (True, False):
            module.train(mode)
            eager = _twin(module)(x)
            compiled = torch.compile(_twin(module), backend="aot_eager")(x)
            _assert_same(compiled, eager, f"{_where(module)}: torch.compile against eager")


class CellCase(_LayerCase):
    """Contract of a recurrent cell; pytest runs every check under every norm of `norms`.

    Shapes, gradients, saving and copying, precisions, packed sequences, layers and directions, the
    layer against its single steps, projections, initialisers and analyses. To omit a check, set it
    to ``None``.

    Attributes:
        layer: the class of layers under test.
        step: the class of its single steps, with the same `ln_zoo.ops.Cell`.
        norms: the norms.

    Example:
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
        if not self.layer.cell.projects:
            # Layers with explicit arguments, such as GRU, lack this one.
            with pytest.raises((ValueError, TypeError), match=r"cannot project|proj_size"):
                self._make(name, proj_size=2)
            return
        module = self._trained(name, proj_size=2, num_layers=2, bidirectional=True)
        output, h, *others = _run(module, _input(name))
        assert (output.shape, h.shape) == ((4, _STEPS, 4), (4, 4, 2)), f"{_where(module)}: {name}"
        assert all(state.shape == (4, 4, 4) for state in others)

    def test_layers_and_directions_are_single_layers(self) -> None:
        name = self.layer.__name__
        module = self._trained(name, num_layers=2, bidirectional=True).eval()
        x = _input(name)
        finals, output = [], x
        for layer in range(2):
            parts = []
            for suffix in (f"l{layer}", f"l{layer}_reverse"):
                single = self._make(name, (output.shape[-1], 4), dtype=torch.float64).eval()
                ends = re.compile(rf"(?<=[._]){suffix}(?=$|\.)")
                own = {key: a for key, a in module.state_dict().items() if ends.search(key)}
                single.load_state_dict({ends.sub("l0", key): a for key, a in own.items()})
                back = suffix.endswith("reverse")
                part, *states = _run(single, output.flip(1) if back else output)
                parts.append(part.flip(1) if back else part)
                finals.append(states)
            output = torch.cat(parts, dim=-1)
        expected = [output, *(torch.cat(states) for states in zip(*finals, strict=True))]
        for one, two in zip(_run(module, x), expected, strict=True):
            _assert_same(one, two, f"{_where(module)}: two layers against four single ones")

    def test_begins_where_it_left_off(self) -> None:
        if self.norm.per_timestep:
            pytest.skip("per_timestep: later steps have statistics of their own")
        name = self.layer.__name__
        module: Any = self._trained(name).eval()
        x = _input(name, steps=6)
        whole, *final = _outputs(module, x)
        first, states = module(x[:, :2])
        second, states = module(x[:, 2:], states)
        _assert_same(torch.cat([first, second], 1), whole, f"{_where(module)}: cut in two")
        states = states if isinstance(states, tuple) else (states,)
        for one, two in zip(states, final, strict=True):
            _assert_same(one, two, f"{_where(module)}: cut in two, final state")

    def test_resets_are_pieces_apart(self) -> None:
        name = self.layer.__name__
        module: Any = self._trained(name, bidirectional=True).eval()
        x = _input(name, steps=6)
        reset = torch.zeros(4, 6, dtype=torch.bool)
        reset[1, [2, 5]] = True
        output = module(x, reset=reset)[0]
        for begin, end in ((0, 2), (2, 5), (5, 6)):
            piece = module(x[1, begin:end])[0]
            where = f"{_where(module)}: steps {begin} to {end} between resets, against those alone"
            _assert_same(output[1, begin:end], piece, where)

    def test_noise_is_drawn_in_training_alone(self) -> None:
        name = self.layer.__name__
        options: dict[str, Any] = {"zoneout": 0.3, "weight_dropout": 0.4}
        if self.layer.cell.drops:
            options["recurrent_dropout"] = 0.3
        else:
            with pytest.raises(ValueError, match="has no recurrent dropout"):
                self._make(name, recurrent_dropout=0.3)
        for option, p in options.items():
            module = self._trained(name, **{option: p})
            x = _input(name)
            for mode in (True, False):
                module.train(mode)
                one, two = (_run(module, x)[0] for _ in range(2))
                assert torch.equal(one, two) != mode, (
                    f"{_where(module)}, {option}={p}: two runs on one input "
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
            x = _input(name)
            where = f"{_where(module)}: without biases, against biases of 0"
            _assert_same(_run(module, x)[0], _run(zeros, x)[0], where)

    def test_initialisers_find_their_rows(self) -> None:
        module: Any = self._make(self.layer.__name__, num_layers=2)
        orthogonal_init(module, forget_bias=2.0)
        blocks = range(module.cell.gates)
        for block in blocks:
            rows = module.weight_hh_l1.split(4)[block]
            assert torch.equal(rows, torch.eye(4)) == (block in module.cell.candidates)
            bias = module.bias_ih_l1.split(4)[block]
            assert (bias == (2.0 if block in module.cell.forget else 0.0)).all()

    def test_analyses_take_it(self) -> None:
        name = self.layer.__name__
        layer: Any = self._trained(name)
        x = torch.randn(5, 4, 5, dtype=torch.float64)
        where = f"{_where(layer)}: "
        norms = gradient_norms(layer, x)
        assert norms.isfinite().all(), f"{where}gradient_norms {norms}"
        growth = perturbation_growth(layer, x)
        assert growth.isfinite().all(), f"{where}perturbation_growth {growth}"


def _fields(norm: Norm) -> list[str]:
    return [f.name for f in dataclasses.fields(norm)] if dataclasses.is_dataclass(norm) else []


def _input(
    layer: str,
    examples: int = 4,
    sizes: tuple[int, int] = (5, 4),
    steps: int = _STEPS,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Random input for a layer: (N, I), (N, I, H, W), or (N, T, I) for layers and cells alike."""
    shape = {"Linear": (sizes[0],), "Conv2d": (sizes[0], *_POSITIONS)}.get(layer, (steps, sizes[0]))
    return torch.randn(examples, *shape, dtype=dtype)


def _outputs(module: nn.Module, x: Any) -> tuple[Tensor, ...]:
    """Output and final states, flat; a cell is stepped along the axis before the last."""
    if isinstance(module, RecurrentCell):
        state, outputs = None, []
        for step, now in enumerate(x.unbind(-2)):
            state = module(now, state, step=step)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        states = state if isinstance(state, tuple) else (state,)
        # In the shape of a layer's final states: (1, N, H).
        return torch.stack(outputs, dim=-2), *(s.unsqueeze(0) for s in states)
    result = module(x)
    if isinstance(result, Tensor):
        return (result,)
    output, states = result
    if not isinstance(output, Tensor):
        output = pad_packed_sequence(output, batch_first=True)[0]
    return (output, *(states if isinstance(states, tuple) else (states,)))


def _run(module: nn.Module, x: Any) -> tuple[Tensor, ...]:
    return _outputs(_twin(module), x)


def _twin(module: Any) -> Any:
    """A copy of the module that shares parameters but not buffers."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters()})


def _randomised(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def _by_record(record: RowNorm | StepNorm, a: Tensor) -> Tensor:
    """Evaluate a record in plain torch, as for time step 0; updates buffers."""
    if isinstance(record, StepNorm):
        return _over_examples(record, a)
    if record.identity:
        return a
    parts = []
    for part in a.split(record.groups, dim=-1):
        size = part.shape[-1]
        if record.center:
            part = part - part.sum(-1, keepdim=True) / size
        parts.append(part / (part.square().sum(-1, keepdim=True) / size + record.eps).sqrt())
    rows = torch.cat(parts, dim=-1)
    if record.gain is not None:
        rows = rows * record.gain
    return rows if record.shift is None else rows + record.shift


def _over_examples(record: StepNorm, a: Tensor) -> Tensor:
    if record.batch:
        n = len(a)
        record.check(n)
        mean = a.sum(0) / n
        squares = (a - mean).square().sum(0)
        record.track(0, [n], mean.detach()[None], squares.detach()[None] / n)
        var = squares / (n - record.correction)
    else:
        mean, var = (rows[0] for rows in record.population(0, 1))
    rows = (a - mean) / (var + record.eps).sqrt()
    if record.gain is not None:
        rows = rows * record.gain
    return rows if record.shift is None else rows + record.shift


def _distance(one: Tensor, other: Tensor) -> float:
    """Largest difference relative to the largest element of ``other``; NaN if either has one."""
    scale = max(other.abs().max().item(), torch.finfo(other.dtype).tiny)
    return ((one - other).abs().max() / scale).item()


def _assert_same(
    one: Tensor, other: Tensor, what: str, tolerance: float = TOLERANCES["float64"]
) -> None:
    assert one.shape == other.shape, f"{what}: shape {tuple(one.shape)}, not {tuple(other.shape)}"
    distance = _distance(one.detach().to(other.dtype), other.detach())
    assert distance <= tolerance, (
        f"{what}: differs by {distance:.1e} of its size, {tolerance:.0e} is allowed"
    )


def _where(module: nn.Module) -> str:
    site = next(m for m in module.modules() if isinstance(m, Site))
    mode = "training" if module.training else "evaluation"
    return f"{type(module).__name__}(norm={site.norm!r}), {mode} mode"
