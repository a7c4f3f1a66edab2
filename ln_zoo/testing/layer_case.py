"""Checks of a norm in layers, shared by `NormCase` and `CellCase`."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ln_zoo.analysis.invariance import INVARIANT, VARIANT
from ln_zoo.layers import Conv2d, RecurrentCell, RecurrentLayer
from ln_zoo.norms import Norm, Site

#: Maximum difference relative to the largest element.
TOLERANCES: dict[str, float] = {
    "float64": 1e-11,  # the same terms, summed in another order
    "float16": 1e-2,  # against float32, after a few time steps
    "bfloat16": 6e-2,
    "generated": 1e-4,  # the generated kernel against float64, after `GENERATED_STEPS`
    "autocast": 6e-2,  # matrix products in bfloat16, against float32
    "invariant": INVARIANT,  # maximum change if Table 1 says invariant (float64, eps = 0)
    "variant": VARIANT,  # minimum change otherwise
}

STEPS = 3
#: Steps from which on a generated kernel runs.
GENERATED_STEPS = 16
_POSITIONS = (4, 3)


class LayerCase:
    """Checks of one norm in several layers, shared by `NormCase` and `CellCase`."""

    norm: Norm

    def _kinds(self) -> dict[str, type[nn.Module]]:
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise each check by the layers that it applies to."""
        if not metafunc.function.__module__.startswith("ln_zoo.testing."):
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
                output = run(module.train(mode), x)[0]
                assert output.shape == (*expected, features, *place), (
                    f"{describe(module)}: input {tuple(x.shape)} gave {tuple(output.shape)}, "
                    f"not {(*expected, features, *place)}"
                )

    def test_unbatched_equals_a_batch_of_one(self, layer: str) -> None:
        module = self._trained(layer)
        x = random_input(layer, examples=1)
        for mode in [False] if self.norm.batch_dependent else [False, True]:
            module.train(mode)
            batched = run(module, x)[0][0]
            assert_same(run(module, x[0])[0], batched, f"{describe(module)}: unbatched input")

    # Gradients

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_gradients_are_those_of_finite_differences(self, layer: str, mode: str) -> None:
        module = self._trained(layer, sizes=(2, 3)).train(mode == "training")
        x = random_input(layer, examples=3, sizes=(2, 3)).requires_grad_()

        # gradcheck perturbs tensors in place, so the module sees the changes.
        def function(*_: Tensor) -> tuple[Tensor, ...]:
            return run(module, x)

        def right(*tensors: Tensor) -> bool:
            return torch.autograd.gradcheck(
                function, tensors, fast_mode=True, raise_exception=False
            )

        named = {"input": x, **dict(module.named_parameters())}
        if not right(*named.values()):
            wrong = [name for name, tensor in named.items() if not right(tensor)]
            pytest.fail(
                f"{describe(module)}: the gradient of {' and '.join(wrong) or 'all together'} is "
                "not that of finite differences"
            )

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_gradients_stay_finite_where_statistics_degenerate(self, layer: str, mode: str) -> None:
        shape = random_input(layer).shape
        inputs = {
            "all inputs 0": torch.zeros(shape),
            "all inputs equal": torch.ones(shape),
            "all examples equal": torch.randn(1, *shape[1:]).expand(shape),
        }
        for what, x in inputs.items():
            module = self._make(layer).train(mode == "training")
            x = x.clone().requires_grad_()
            output = run(module, x)[0]
            (output * torch.randn_like(output)).sum().backward()
            for name, tensor in [("input", x), *module.named_parameters()]:
                assert tensor.grad is None or torch.isfinite(tensor.grad).all(), (
                    f"{describe(module)}, {what}: the gradient of {name} is not finite; "
                    "add an eps inside the root"
                )
            assert torch.isfinite(output).all(), f"{describe(module)}, {what}: output not finite"

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
        x = random_input(layer)
        # Copies are taken after a backward pass too: averaging callbacks do so.
        run(module, x)[0].sum().backward()
        for what, again in [
            ("a deep copy", copy.deepcopy(module)),
            ("a pickled copy", pickle.loads(pickle.dumps(module))),
        ]:
            self._assert_equal_behaviour(again, module, f"of {what}")
            shared = {id(t) for t in module.state_dict(keep_vars=True).values()}
            assert not shared & {id(t) for t in again.state_dict(keep_vars=True).values()}, (
                f"{describe(module)}: {what} shares tensors with the original"
            )

    def test_evaluation_changes_nothing(self, layer: str) -> None:
        module = self._trained(layer).eval()
        before = copy.deepcopy(module.state_dict())
        x = random_input(layer)
        for one, two in zip(outputs_of(module, x), outputs_of(module, x), strict=True):
            assert torch.equal(one, two), f"{describe(module)}: two runs on one input differ"
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name]), (
                f"{describe(module)}: evaluation changed {name}; test site.training first"
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
        output, *states = outputs_of(module, packed)
        for example, length in enumerate(lengths):
            alone, *alone_states = outputs_of(module, x[example : example + 1, :length])
            where = (
                f"{describe(module)}: example {example} of a packed batch against the example alone"
            )
            assert_same(output[example, :length], alone[0], where)
            assert not output[example, length:].any(), f"{where}: padding is not 0"
            for packed_state, state in zip(states, alone_states, strict=True):
                assert_same(packed_state[:, example], state[:, 0], f"{where}, final state")

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_layers_equal_their_cells_step_by_step(self, recurrent: str, mode: str) -> None:
        module = self._trained(recurrent).train(mode == "training")
        cell = self._make(self._step_of(recurrent), dtype=torch.float64).train(module.training)
        state = {
            name.replace("sites.l0.", "sites.").replace("_l0", ""): value
            for name, value in module.state_dict().items()
        }
        cell.load_state_dict(state, strict=True)
        x = random_input(recurrent)
        for ours, theirs in zip(run(module, x), run(cell, x), strict=True):
            assert_same(ours, theirs, f"{describe(module)}: the whole sequence against its cell")

    @pytest.mark.parametrize("mode", ["training", "evaluation"])
    def test_fast_path_equals_the_generic_scan(
        self, recurrent: str, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = self._trained(recurrent, bidirectional=True).train(mode == "training")
        x = random_input(recurrent, steps=7).requires_grad_()
        wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
        names = ["input", *(n for n, p in module.named_parameters() if p.requires_grad)]
        results = []
        for switch in ("1", "0"):
            monkeypatch.setenv("LN_ZOO_KERNELS", switch)
            outputs = run(module, x)
            torch.default_generator.manual_seed(1)
            loss = sum(((out * torch.randn_like(out)).sum() for out in outputs), x.new_zeros(()))
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            results.append((outputs, gradients))
        (fast, fast_gradients), (scan, scan_gradients) = results
        where = f"{describe(module)}: the fast path against the generic scan"
        for one, two in zip(fast, scan, strict=True):
            assert_same(one, two, where)
        for name, one, two in zip(names, fast_gradients, scan_gradients, strict=True):
            assert_same(one, two, f"{where}, gradient of {name}")

    def test_generated_kernel_equals_the_generic_scan(
        self, recurrent: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Compiles the step of a layer; in float32, forward and backward, against float64."""
        if recurrent != self._generated():
            pytest.skip("the kernel generated for another layer is checked")
        module = self._trained(recurrent, dtype=torch.float32).train(not self.norm.batch_dependent)
        x = random_input(recurrent, steps=GENERATED_STEPS, dtype=torch.float32)

        def results(layer: nn.Module, x: Tensor, kernels: str) -> dict[str, Tensor]:
            monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
            x = x.clone().requires_grad_()
            outputs = run(layer, x)
            found = {f"output {i}": a.detach().double() for i, a in enumerate(outputs)}
            named = {"input": x, **dict(layer.named_parameters())}
            loss = torch.stack([(a * torch.cos(7 * a.detach())).sum() for a in outputs]).sum()
            gradients = torch.autograd.grad(
                loss, list(named.values()), allow_unused=True, materialize_grads=True
            )
            pairs = zip(named, gradients, strict=True)
            return found | {f"the gradient of {name}": d.double() for name, d in pairs}

        exact = results(copy.deepcopy(module).double(), x.double(), "0")
        loop, made = (results(module, x, kernels) for kernels in ("0", "generated"))
        for name, a in exact.items():
            scale = a.abs().max().clamp(min=1e-6)
            error, own = ((made[name] - a).abs().max(), (loop[name] - a).abs().max())
            assert error <= max(TOLERANCES["generated"] * scale, 20 * own), (
                f"{describe(module)}: the generated kernel against float64: {name} differs by "
                f"{error:.1e}, that of the generic loop by {own:.1e}"
            )

    # Precision and devices

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision(self, layer: str, dtype: torch.dtype) -> None:
        half = self._trained(layer, dtype=torch.float32).to(dtype)
        for name, buffer in half.named_buffers():
            assert buffer.dtype not in (torch.float16, torch.bfloat16), (
                f"{describe(half)}: buffer {name} became {buffer.dtype}; use site.add_buffer, "
                "which keeps running statistics in float32"
            )
        x = random_input(layer, dtype=dtype)
        single = copy.deepcopy(half).float()
        for mode in (True, False):
            outputs = run(half.train(mode), x)
            for out, exact in zip(outputs, run(single.train(mode), x.float()), strict=True):
                where = f"{describe(half)}: {dtype} against float32"
                assert out.dtype == dtype, f"{where}: the output is {out.dtype}"
                assert_same(out, exact, where, TOLERANCES[str(dtype).removeprefix("torch.")])

    def test_float64_stays_float64(self, layer: str) -> None:
        module = self._trained(layer)
        for name, tensor in module.state_dict().items():
            assert not tensor.is_floating_point() or tensor.dtype == torch.float64, (
                f"{describe(module)}: {name} is {tensor.dtype} in a float64 layer"
            )
        narrow = copy.deepcopy(module).float()
        for mode in (True, False):
            outputs = run(module.train(mode), random_input(layer))
            assert all(out.dtype == torch.float64 for out in outputs), (
                f"{describe(module)}: float64 input gave {[out.dtype for out in outputs]}"
            )
            outputs = run(narrow.train(mode), random_input(layer, dtype=torch.float32))
            assert all(out.dtype == torch.float32 for out in outputs), (
                f"{describe(module)}: float32 input gave {[out.dtype for out in outputs]}"
            )

    def test_autocast(self, layer: str) -> None:
        module = self._trained(layer, dtype=torch.float32)
        x = random_input(layer, dtype=torch.float32)
        for mode in (True, False):
            module.train(mode).zero_grad()
            exact = run(module, x)
            with torch.autocast("cpu", torch.bfloat16):
                outputs = run(module, x)
            where = f"{describe(module)}: under autocast"
            for out, wide in zip(outputs, exact, strict=True):
                assert_same(out, wide, f"{where} against float32", TOLERANCES["autocast"])
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
                f"{describe(module)}: {name} is on {tensor.device}, the layer on meta; make "
                "tensors with site.add_parameter from existing tensors, or with site.add_buffer"
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

    def _generated(self) -> str:
        """The layer whose generated kernel is checked; each takes a second to compile."""
        return next(n for n, cls in self._kinds().items() if issubclass(cls, RecurrentLayer))

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
        module = randomised(self._make(layer, dtype=dtype, **options))
        sizes = options.get("sizes", (5, 4))
        with torch.no_grad():
            for _ in range(2):
                outputs_of(module, random_input(layer, dtype=dtype, sizes=sizes))
        return module

    def _influence(self, layer: str, training: bool) -> float:
        """Largest gradient of one example's output with respect to another's input."""
        module = self._trained(layer).train(training)
        x = random_input(layer).requires_grad_()
        output = run(module, x)[0][0]
        (gradient,) = torch.autograd.grad((output * torch.randn_like(output)).sum(), x)
        assert gradient[0].any(), (
            f"{describe(module)}: an example's output does not depend on its input"
        )
        return gradient[1:].abs().max().item()

    def _assert_equal_behaviour(self, one: nn.Module, other: nn.Module, what: str) -> None:
        x = random_input(type(other).__name__)
        for mode in (True, False):
            pairs = zip(run(one.train(mode), x), run(other.train(mode), x), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (
                f"{describe(other)}: outputs {what} differ from the original's"
            )


def random_input(
    layer: str,
    examples: int = 4,
    sizes: tuple[int, int] = (5, 4),
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Random input for a layer: (N, I), (N, I, H, W), or (N, T, I) for layers and cells alike."""
    shape = {"Linear": (sizes[0],), "Conv2d": (sizes[0], *_POSITIONS)}.get(layer, (steps, sizes[0]))
    return torch.randn(examples, *shape, dtype=dtype)


def outputs_of(module: nn.Module, x: Any) -> tuple[Tensor, ...]:
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


def run(module: nn.Module, x: Any) -> tuple[Tensor, ...]:
    """As `outputs_of`; leaves the module's buffers as they are."""
    return outputs_of(twin_of(module), x)


def twin_of(module: Any) -> Any:
    """A copy of the module that shares parameters but not buffers."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters()})


def randomised(module: Any) -> Any:
    """The module, after noise is added to its parameters."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def _distance(one: Tensor, other: Tensor) -> float:
    """Largest difference relative to the largest element of ``other``; NaN if either has one."""
    scale = max(other.abs().max().item(), torch.finfo(other.dtype).tiny)
    return ((one - other).abs().max() / scale).item()


def assert_same(
    one: Tensor, other: Tensor, what: str, tolerance: float = TOLERANCES["float64"]
) -> None:
    """Fail unless two tensors agree, relative to the largest element of ``other``."""
    assert one.shape == other.shape, f"{what}: shape {tuple(one.shape)}, not {tuple(other.shape)}"
    distance = _distance(one.detach().to(other.dtype), other.detach())
    assert distance <= tolerance, (
        f"{what}: differs by {distance:.1e} of its size, {tolerance:.0e} is allowed"
    )


def describe(module: nn.Module) -> str:
    """A module's class, norm and mode, for messages."""
    site = next(m for m in module.modules() if isinstance(m, Site))
    mode = "training" if module.training else "evaluation"
    return f"{type(module).__name__}(norm={site.norm!r}), {mode} mode"
