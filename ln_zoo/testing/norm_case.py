"""The contract of a norm."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from ln_zoo.analysis.invariance import invariance_table
from ln_zoo.analysis.stepping import cpu_seed
from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, GRUCell, Linear, LSTMCell, RNNCell
from ln_zoo.norms import INVARIANCES, Norm, Site, from_config, to_config
from ln_zoo.ops.norm_records import RowNorm, StepNorm
from ln_zoo.testing.layer_case import (
    TOLERANCES,
    LayerCase,
    assert_same,
    describe,
    random_input,
    randomised,
    twin_of,
)

_KINDS: dict[str, type[nn.Module]] = {
    cls.__name__: cls for cls in (Linear, Conv2d, LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell)
}
#: Layers with normalised sums by class name.
LAYERS: tuple[str, ...] = tuple(_KINDS)


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


class NormCase(LayerCase):
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
        site = randomised(Site(self.norm, "recurrent", 6, recurrent=True, dtype=torch.float64))
        for step in range(4):
            site((step + 1) * torch.randn(5, 6, dtype=torch.float64) + step, step)
        a = torch.randn(5, 6, dtype=torch.float64)
        differ = {
            mode: any(
                not torch.equal(twin_of(site).train(mode)(a, 0), twin_of(site).train(mode)(a, step))
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
        for site in map(randomised, sites):
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
            twin = twin_of(site)
            plain, own = _by_record(record, a), twin(a, 0)
            assert_same(plain, own, f"{where} differs from normalize()")
            # The record updates running statistics as the norm does.
            for name, buffer in twin.named_buffers():
                updated = site.get_buffer(name).double()
                assert_same(updated, buffer.double(), f"{where} leaves another {name}")
            gradients = [
                torch.autograd.grad(
                    (out * head).sum(), wanted, allow_unused=True, materialize_grads=True
                )
                for out in (plain, own)
            ]
            for one, two in zip(*gradients, strict=True):
                assert_same(one, two, f"{where} has other gradients than normalize()")
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
        x = random_input("Linear").requires_grad_()
        for mode in (True, False):
            module.train(mode)
            eager = twin_of(module)(x)
            compiled = torch.compile(twin_of(module), backend="aot_eager")(x)
            assert_same(compiled, eager, f"{describe(module)}: torch.compile against eager")


def _fields(norm: Norm) -> list[str]:
    return [f.name for f in dataclasses.fields(norm)] if dataclasses.is_dataclass(norm) else []


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
