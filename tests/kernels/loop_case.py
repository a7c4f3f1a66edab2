"""Checks that every loop with kernels passes (DRAW, the window), on any engine.

A problem is a dictionary of tensors in float64, such as float32 can hold.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate, assert_within, limits, moved
from engines import needs_native
from torch import Tensor

from ln_zoo.ops.engines.base import Engine

F32, F64 = torch.float32, torch.float64
Problem = dict[str, Tensor]
Function = Callable[[Problem], tuple[Tensor, ...]]


@dataclass
class Under:
    """The engine under test, how often it was asked, and the best precision that it has."""

    engine: Engine
    dtype: torch.dtype = F32
    calls: int = 0

    def alone(self, patch: pytest.MonkeyPatch) -> Under:
        """Layers run on this engine, whose calls are counted."""
        prepare = self.engine.prepare

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return prepare(*arguments, **options)

        patch.setenv("LN_ZOO_KERNELS", self.engine.name)
        patch.setattr(self.engine, "prepare", counted)
        return self


def cast(p: Problem, dtype: torch.dtype) -> Problem:
    return {name: a.detach().to(dtype, copy=True) for name, a in p.items()}


def cotangents_of(results: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(a.shape, generator=generator).to(a.dtype) for a in results]


def spread(a: Tensor) -> Tensor:
    """The same numbers, the axes reversed in memory, and every second place unused."""
    turned = a.permute(*reversed(range(a.dim()))).contiguous()
    wide = turned.repeat_interleave(2, -1)[..., ::2]
    return wide.permute(*reversed(range(a.dim())))


class LoopCase:
    """A subclass has a problem, the loop on an engine, and its equations.

    Attributes:
        results: names of what both return.
        given: names of tensors that take no gradient.
        changed: results that the backward reads, by number.
        double: the error allowed in float64.
        contiguous: names of tensors that must be contiguous.
    """

    results: tuple[str, ...]
    given: tuple[str, ...]
    changed: tuple[int, ...]
    double = 1e-12
    contiguous: tuple[str, ...] = ()

    def problem(self) -> Problem:
        raise NotImplementedError

    def equations(self, p: Problem) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def engine(self, under: Any) -> Function:
        raise NotImplementedError

    def none_of(self, name: str, a: Tensor) -> Tensor:
        """Drop the examples of a tensor of the problem."""
        raise NotImplementedError

    def chosen(self, p: Problem) -> str | None:
        """Name of the selected engine; None for the generic loop."""
        raise NotImplementedError

    def run(
        self,
        function: Function,
        p: Problem,
        dtype: torch.dtype,
        results: tuple[str, ...] | None = None,
    ) -> dict[str, Tensor]:
        """Results, and the gradients of all that takes one, by name."""
        p = cast(p, dtype)
        leaves = {name: a.requires_grad_() for name, a in p.items() if name not in self.given}
        found = dict(zip(self.results, function(p), strict=True))
        cotangents = dict(zip(found, cotangents_of(list(found.values())), strict=True))
        names = [name for name in results or self.results if found[name].requires_grad]
        gradients = torch.autograd.grad(
            [found[name] for name in names],
            list(leaves.values()),
            [cotangents[name] for name in names],
            allow_unused=True,
            materialize_grads=True,
        )
        found = {name: a.detach() for name, a in found.items()}
        return found | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}

    def in_float32(
        self, function: Function, p: Problem, results: tuple[str, ...] | None = None
    ) -> Callable[[int], dict[str, Tensor]]:
        """What `run` gives in float32, of problems `moved` for a run of that number."""
        return lambda k: self.run(
            function, {name: moved(a, k) for name, a in p.items()}, F32, results
        )

    def compare(
        self, under: Any, p: Problem | None = None, results: tuple[str, ...] | None = None
    ) -> None:
        """The engine against the equations."""
        p = self.problem() if p is None else p
        expected = self.run(self.equations, p, F64, results)
        found = self.run(self.engine(under), p, F32, results)
        loop = self.in_float32(self.equations, p, results)
        assert_as_accurate(found, expected, loop, self.double)

    def leaves(self, p: Problem) -> list[Tensor]:
        return [a.requires_grad_() for name, a in p.items() if name not in self.given]

    def test_gradients_of_some_results_alone(self, under: Any) -> None:
        for name in self.results:
            self.compare(under, results=(name,))

    def test_single_gradients_are_those_of_all(self, under: Any) -> None:
        full = self.run(self.engine(under), self.problem(), F32)
        p = cast(self.problem(), F32)
        for name in p.keys() - set(self.given):
            leaf = p[name].requires_grad_()
            results = [a for a in self.engine(under)(p) if a.requires_grad]
            assert len(results) == len(self.results)
            (gradient,) = torch.autograd.grad(results, leaf, cotangents_of(results))
            assert torch.equal(gradient, full[f"d{name}"]), name
            p[name] = leaf.detach()

    def test_without_gradients_results_are_the_same(self, under: Any) -> None:
        p = cast(self.problem(), F32)
        name = next(name for name in p if name not in self.given)
        with_leaf = p | {name: p[name].clone().requires_grad_()}
        with torch.no_grad():
            quiet = self.engine(under)(with_leaf)
        with torch.inference_mode():
            inference = self.engine(under)(p)
        expected = self.engine(under)(with_leaf)
        for other in (quiet, inference, self.engine(under)(p)):
            for one, two in zip(expected, other, strict=True):
                assert not two.requires_grad
                assert torch.equal(one.detach(), two.clone())
        # Memory that inference mode made is not used again.
        sum(a.sum() for a in expected).backward()  # type: ignore[union-attr]

    def test_threads_change_rounding_alone_and_runs_nothing(self, under: Any) -> None:
        p, results = self.problem(), []
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            results.append(self.run(self.engine(under), p, F32))
        one, two, again, three = results
        allowed = limits(one, self.in_float32(self.equations, p))
        for other in (two, three):
            assert_within(other, one, allowed)
        assert all(torch.equal(two[name], again[name]) for name in two)

    def test_backward_twice_gives_the_same_gradients(self, under: Any) -> None:
        p = cast(self.problem(), F32)
        sources = self.leaves(p)
        loss = sum(a.square().sum() for a in self.engine(under)(p))
        first = torch.autograd.grad(loss, sources, retain_graph=True)
        second = torch.autograd.grad(loss, sources)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_arguments_are_left_as_they_are(self, under: Any) -> None:
        p = cast(self.problem(), F32)
        before = cast(p, F32)
        self.leaves(p)
        sum(a.sum() for a in self.engine(under)(p)).backward()  # type: ignore[union-attr]
        assert all(torch.equal(a.detach(), before[name]) for name, a in p.items())

    def test_tensors_may_have_any_strides(self, under: Any) -> None:
        p = self.problem()

        def function(p: Problem) -> tuple[Tensor, ...]:
            strided = {name: spread(a) for name, a in p.items() if name not in self.contiguous}
            assert not any(a.is_contiguous() for a in strided.values())
            return self.engine(under)(p | strided)

        found, expected = self.run(function, p, F32), self.run(self.equations, p, F64)
        assert_as_accurate(found, expected, self.in_float32(self.equations, p), self.double)

    def test_gradients_may_come_expanded(self, under: Any) -> None:
        def total(function: Function, dtype: torch.dtype, k: int = 0) -> dict[str, Tensor]:
            p = cast({name: moved(a, k) for name, a in self.problem().items()}, dtype)
            sources = self.leaves(p)
            gradients = torch.autograd.grad(sum(a.sum() for a in function(p)), sources)
            return {str(i): g for i, g in enumerate(gradients)}

        found, expected = total(self.engine(under), F32), total(self.equations, F64)
        assert_as_accurate(found, expected, lambda k: total(self.equations, F32, k), self.double)

    def test_no_examples(self, under: Any) -> None:
        p = {name: self.none_of(name, a) for name, a in self.problem().items()}
        found = self.run(self.engine(under), p, F32)
        assert not any(a.numel() for a in list(found.values())[: len(self.results)])
        assert not any(a.any() for name, a in found.items() if name.startswith("d"))

    def test_transforms_of_functions_are_left_to_others(self) -> None:
        p, seen = cast(self.problem(), F32), []

        def asked(a: Tensor) -> Tensor:
            seen.append(self.chosen(p | {"x": a}))
            return a

        torch.func.vmap(asked)(p["x"][None])
        torch.func.grad(lambda a: asked(a).sum())(p["x"])
        with torch.autograd.forward_ad.dual_level():
            asked(p["x"])
        assert seen == [None] * 3

    @needs_native
    def test_the_fastest_engine_is_taken_that_is_allowed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        p, choices = cast(self.problem(), F32), {"": "native", "0": None, "aten": None}
        for value, name in (choices | {"aten, native": "native"}).items():
            monkeypatch.setenv("LN_ZOO_KERNELS", value)
            assert self.chosen(p) == name
            assert self.chosen(cast(p, F64)) is None
        monkeypatch.setenv("LN_ZOO_KERNELS", "nativ")
        with pytest.raises(ValueError, match="no kernel called 'nativ'"):
            self.chosen(p)

    def test_no_memory_is_lost(self, under: Any) -> None:
        p = cast(self.problem(), F32)
        self.leaves(p)
        counts = []
        for _ in range(4):
            self.engine(under)(p)[0].sum().backward()
            self.engine(under)(p)
            gc.collect()
            counts.append(sum(isinstance(o, Tensor) for o in gc.get_objects()))
        assert counts[1] == counts[3]

    def test_results_that_the_backward_reads_must_not_change(self, under: Any) -> None:
        p = cast(self.problem(), F32)
        self.leaves(p)
        for i in self.changed:
            results = self.engine(under)(p)
            results[i].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                results[0].sum().backward()
        results = self.engine(under)(p)
        loss = results[0].sum()
        for i, a in enumerate(results):
            if i not in self.changed:
                a.add_(1)
        loss.backward()

    @pytest.mark.parametrize(
        "options", [{"create_graph": True}, {"is_grads_batched": True}], ids=["twice", "batch"]
    )
    def test_other_gradients_are_refused(self, options: dict[str, bool], under: Any) -> None:
        p = cast(self.problem(), F32)
        sources = self.leaves(p)
        output = self.engine(under)(p)[0]
        heads = torch.stack([output] * 2) if "is_grads_batched" in options else output
        with pytest.raises(RuntimeError, match=r"LN_ZOO_KERNELS=0"):
            torch.autograd.grad(output, sources, heads, **options)
