"""What layers remember between calls, and when they must not."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accuracy import generic_loop
from engines import names_of, needs_native
from equations import resets_for
from layer_results import flat
from own_cell import MGU
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from ln_zoo.layers import GRU, LSTM, DreamerV3SequenceModel, LSTMCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, Site
from ln_zoo.ops import Record, RowNorm, registry
from ln_zoo.ops.engines.torch_rnn import TorchRNN


class StepOfAModel(DreamerV3SequenceModel):
    forward = DreamerV3SequenceModel.step  # type: ignore[assignment]


MODULES: dict[str, Callable[..., Any]] = {
    "layer": lambda **options: LSTM(7, 20, **options),
    "layers": lambda **options: GRU(7, 20, num_layers=2, bidirectional=True, **options),
    "cell": lambda **options: LSTMCell(7, 20, **options),
    "own cell": lambda **options: MGU(7, 20, **options),  # on a generated kernel
    "blocks": lambda **options: GRU(7, 20, blocks=4, **options),
    "step of a model": lambda **options: StepOfAModel(64, 128, projection_size=64, **options),
}
INPUTS = {"layer": (2, 3, 7), "layers": (2, 3, 7), "cell": (3, 7)}
INPUTS |= {"own cell": (16, 3, 7), "blocks": (16, 3, 7), "step of a model": (20, 64)}
every_module = pytest.mark.parametrize("kind", MODULES)


def assert_right(module: Any, x: Tensor) -> None:
    """Two calls give what the generic loop gives, with and without gradients."""
    for _ in range(2):
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                found = flat(module(x))
            with mode(), generic_loop():
                wanted = flat(module(x))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            assert [a.requires_grad for a in found] == [a.requires_grad for a in wanted]


@pytest.mark.parametrize("norm", [LayerNorm(), Identity()])
@every_module
def test_the_second_call_asks_nothing(
    kind: str, norm: Norm, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = MODULES[kind](norm=norm), torch.randn(INPUTS[kind])
    module(x)
    assert len(chosen) == 1
    if chosen[0] is None:
        pytest.skip("a step in functions of torch has no plan")
    module(x)
    with torch.no_grad():
        module(torch.randn(INPUTS[kind]))
    assert len(chosen) == 1
    module(torch.cat([x, x]))
    assert len(chosen) == 2
    module(torch.cat([x, x]))
    module(x)
    assert len(chosen) == 2
    torch.set_num_threads(1 + torch.get_num_threads() % 2)
    module(x)
    assert len(chosen) == 3
    monkeypatch.setenv("LN_ZOO_KERNELS", "aten")
    module(x)
    assert len(chosen) == 4


def site(module: Any) -> Any:
    sites = [m for m in module.modules() if isinstance(m, Site)]
    return next((m for m in sites if m.gain is not None), sites[0])


def set_data(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    parameter = next(module.parameters())
    parameter.data = change(parameter.detach())


def new_gain(module: Any) -> None:
    site(module).gain = nn.Parameter(torch.full_like(site(module).gain, 2.0))


def new_site(module: Any) -> None:
    sites = next(m for m in module.modules() if isinstance(m, nn.ModuleDict) and "input" in m)
    role = next(role for role, each in sites.items() if each.gain is not None)
    sites[role] = copy.deepcopy(sites[role])
    with torch.no_grad():
        sites[role].gain.fill_(3.0)


def new_sites(module: Any) -> None:
    owner = next(m for m in module.modules() if "sites" in m._modules)
    owner.sites = copy.deepcopy(owner.sites)
    with torch.no_grad():
        for parameter in owner.sites.parameters():
            parameter.mul_(1.5)


def in_place(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrised(module: Any) -> None:
    owner = next(m for m in module.modules() if m._parameters)
    parametrize.register_parametrization(owner, next(iter(owner._parameters)), Doubled())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data": lambda m: set_data(m, torch.randn_like),
    "transposed data": lambda m: set_data(m, lambda a: a.t().contiguous().t()),
    "gain": new_gain,
    "no gain": lambda m: setattr(site(m), "gain", None),
    "gain in double": lambda m: setattr(site(m).gain, "data", site(m).gain.data.double()),
    "norm": lambda m: setattr(site(m), "norm", RMSNorm(eps=0.3)),
    "site": new_site,
    "sites": new_sites,
    "in place": in_place,
    "cast": lambda m: m.double().float(),
    "frozen": lambda m: m.requires_grad_(False),
    "loaded": lambda m: m.load_state_dict(
        {name: a + 0.1 for name, a in m.state_dict().items()}, assign=True
    ),
    "parametrised": parametrised,
    "threads": lambda m: torch.set_num_threads(1 + torch.get_num_threads() % 2),
}


@pytest.mark.parametrize("change", CHANGES)
@every_module
def test_a_plan_ends_with_what_it_rests_on(kind: str, change: str) -> None:
    module, x = MODULES[kind](norm=LayerNorm()), torch.randn(INPUTS[kind])
    assert_right(module, x)
    CHANGES[change](module)
    assert_right(module, x)


@every_module
def test_what_is_wrong_is_said_as_at_the_first_call(kind: str) -> None:
    x = torch.randn(INPUTS[kind])
    for change in (
        lambda m: m.double(),
        lambda m: setattr(next(m.parameters()), "data", torch.randn(2, 2)),
        lambda m: m.to("meta"),
        lambda m: new_gain(m) or setattr(site(m).gain, "data", torch.ones(3)),
    ):
        fresh, used = (MODULES[kind](norm=LayerNorm()) for _ in range(2))
        used(x)
        messages = []
        for module in (fresh, used):
            change(module)
            with pytest.raises((RuntimeError, ValueError)) as error:
                module(x)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    module = MODULES[kind](norm=LayerNorm())
    module(x)
    state = (torch.zeros(1, 1),) * 2
    with pytest.raises(RuntimeError, match=r"Expected hidden|For batched"):
        module(x, state if kind in ("layer", "cell") else state[0])


@every_module
def test_plans_serve_inference_mode(kind: str, chosen: list[Any]) -> None:
    """Whichever mode they were made in."""
    for made in (torch.enable_grad, torch.inference_mode):
        module, x = MODULES[kind](norm=LayerNorm()), torch.randn(INPUTS[kind])
        with made():
            wanted = flat(module(x))
        calls = len(chosen)
        for mode in (torch.enable_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(flat(module(x)), wanted)
        assert len(chosen) == calls


@pytest.mark.parametrize("kind", ["cell", "step of a model"])
def test_a_caller_may_change_a_state_in_place(kind: str) -> None:
    module, inputs = MODULES[kind](norm=LayerNorm()), torch.randn(4, *INPUTS[kind])

    def gradients() -> Any:
        state = None
        for x in inputs:
            state = module(x, state)
            h = flat(state)[0]
            h.mul_(0.5)
        return torch.autograd.grad(h.square().sum(), list(module.parameters()))

    module(inputs[0])
    found = gradients()
    with generic_loop():
        wanted = gradients()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@every_module
def test_other_modes_find_no_plan(kind: str, chosen: list[Any]) -> None:
    module, x = MODULES[kind](norm=LayerNorm()), torch.randn(INPUTS[kind])
    module(x)
    chosen.clear()
    with torch.autograd.forward_ad.dual_level():
        module(torch.autograd.forward_ad.make_dual(x, x))
    torch.vmap(lambda a: flat(module(a))[0])(x.unsqueeze(0))
    assert len(chosen) == 2


@needs_native
@pytest.mark.parametrize(
    ("kind", "half", "norm"),
    [("layer", False, LayerNorm()), ("layers", True, Identity()), ("cell", True, LayerNorm())],
)
def test_plans_under_autocast_are_of_their_own(
    kind: str, half: bool, norm: Norm, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    module = MODULES[kind](norm=norm)
    inputs = torch.randn(INPUTS[kind])

    def results(dtype: torch.dtype | None) -> list[Tensor]:
        """With inputs in half precision, as from a layer before this one, where there is any."""
        x = inputs.detach().to(dtype if half else None).requires_grad_()
        module.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            found = flat(module(x))
        sum(a.float().square().sum() for a in found).backward()
        return [*found, x.grad, *(a.grad for a in module.parameters())]

    kinds = [None, torch.bfloat16, torch.float16]
    first = [results(dtype) for dtype in kinds]
    assert names_of(chosen) == ["native"] * 3
    again = [results(dtype) for dtype in kinds]
    assert len(chosen) == 3
    for found, wanted, dtype in zip(again, first, kinds, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)
        if kind != "cell":
            assert found[0].dtype == (dtype or torch.float32)


@needs_native
def test_float32_plans_under_autocast_need_weights_in_float32(
    chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    module, x = LSTM(7, 20, norm=LayerNorm()).bfloat16(), torch.randn(2, 3, 7)
    with torch.autocast("cpu", torch.bfloat16):
        first, second = flat(module(x)), flat(module(x))
    assert names_of(chosen) == ["native"] * 2
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)


@needs_native
@pytest.mark.parametrize("kernels", ["native", "generated"])
def test_calls_with_and_without_resets_have_plans_of_their_own(
    kernels: str, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a plan takes the resets of its call."""
    layer, x = LSTM(7, 20, norm=LayerNorm()), torch.randn(16, 4, 7)
    flags = resets_for(16, 4).view(16, 4)
    resets = [None, *(flags ^ (torch.arange(4) < n) for n in range(3))]
    with generic_loop():
        wanted = [flat(layer(x, reset=reset)) for reset in resets]
    monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
    chosen.clear()
    for _ in range(2):
        for reset, expected in zip(resets, wanted, strict=True):
            found = flat(layer(x, reset=reset))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert names_of(chosen) == [kernels] * 2
    # Flags of other strides, as of a single example of a batch.
    alone = torch.stack([layer(x[:, n], reset=flags[:, n])[0] for n in range(4)], 1)
    torch.testing.assert_close(alone, wanted[1][0], rtol=1e-4, atol=1e-5)


@every_module
def test_copies_begin_without_plans(kind: str) -> None:
    module, x = MODULES[kind](norm=LayerNorm()), torch.randn(INPUTS[kind])
    wanted = flat(module(x))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.0)
        torch.testing.assert_close(flat(twin(x)), wanted)
        in_place(twin)
        assert not torch.equal(flat(twin(x))[0], wanted[0])
    torch.testing.assert_close(flat(module(x)), wanted)


def test_a_shallow_copy_may_have_other_parameters() -> None:
    """As `torch.nn.DataParallel` makes them."""
    cell, x = LSTMCell(7, 20, norm=LayerNorm()), torch.randn(3, 7)
    cell(x)
    twin = cell._replicate_for_data_parallel()
    twin._parameters = {
        n: None if p is None else nn.Parameter(2 * p) for n, p in cell._parameters.items()
    }
    assert_right(twin, x)
    assert_right(cell, x)


def test_a_shallow_copy_may_have_other_options() -> None:
    layer, x = GRU(7, 20, norm=LayerNorm(), zoneout=0.3).eval(), torch.randn(2, 3, 7)
    wanted = flat(layer(x))
    twin = copy.copy(layer)
    twin.zoneout = (0.0,)
    plain = copy.deepcopy(twin)
    for first, second in ((twin, layer), (layer, twin)):
        for module in (first, second):
            expected = wanted if module is layer else flat(plain(x))
            torch.testing.assert_close(flat(module(x)), expected)
    assert not torch.allclose(wanted[0], flat(plain(x))[0])


@every_module
def test_a_graph_of_parameters_that_were_computed_is_not_kept(kind: str) -> None:
    """As `functional_call` passes them."""
    module, x = MODULES[kind](norm=LayerNorm()), torch.randn(INPUTS[kind])
    name, leaf = next(iter(module.named_parameters()))
    computed = leaf * 2
    kept = weakref.ref(computed)
    flat(functional_call(module, {name: computed}, x))
    del computed
    gc.collect()
    assert kept() is None
    assert_right(module, x)


def test_threads_may_share_a_module() -> None:
    cell = LSTMCell(7, 50, norm=LayerNorm())
    inputs = [torch.randn(1 + i % 2, 7) for i in range(8)]

    def steps(x: Tensor) -> list[list[Tensor]]:
        with torch.no_grad():
            return [flat(cell(x)) for _ in range(200)]

    wanted = [steps(x)[0] for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(steps, inputs), wanted, strict=True):
            for states in found:
                assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))


@dataclass(frozen=True)
class Computed(Norm):
    """Describes itself by tensors made anew at each call."""

    def init_params(self, site: Site) -> None:
        site.add_affine(1.0)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        return a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1.0) * self._gain(site)

    def to_spec(self, site: Site) -> Record:
        return RowNorm((site.features,), True, False, 1.0, self._gain(site))

    def _gain(self, site: Site) -> Tensor:
        return site.gain.exp()


@dataclass(frozen=True)
class Softened(RMSNorm):
    def weight(self, site: Site, weight: Tensor) -> Tensor:
        return weight.tanh()


@pytest.mark.parametrize("norm", [Computed(), Softened(), BatchNorm()])
@pytest.mark.parametrize("kind", ["layer", "cell"])
def test_norms_that_are_asked_at_each_call(kind: str, norm: Norm) -> None:
    normalize = ("input",) if isinstance(norm, Computed) else None
    module = MODULES[kind](norm=norm, normalize=normalize).eval()
    x = torch.randn(INPUTS[kind])
    if kind == "cell" and isinstance(norm, BatchNorm):
        with pytest.raises(ValueError, match="step=t"):
            module(x)
        return
    assert_right(module, x)
    in_place(module)
    assert_right(module, x)


def test_a_plan_needs_plain_tensors(chosen: list[Any]) -> None:
    class Own(Tensor):
        pass

    layer, x = LSTM(7, 20, norm=LayerNorm()), torch.randn(2, 3, 7)
    layer(x)
    wanted = flat(layer(x))
    chosen.clear()
    torch.testing.assert_close([a.as_subclass(Tensor) for a in flat(layer(x.as_subclass(Own)))],
                               wanted)  # fmt: skip
    negative = torch.randn(2, 3, 7, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert_right(layer, negative)
    assert len(chosen) > 1


@every_module
def test_negated_views_of_contiguous_memory(kind: str) -> None:
    module, x = MODULES[kind](norm=LayerNorm()), torch.randn(INPUTS[kind])
    assert_right(module, x)
    assert_right(module, torch._neg_view(x))
    found = module(x)
    states = found if x.dim() == 2 else found[1]
    states = (states,) if isinstance(states, Tensor) else states
    negated = tuple(torch._neg_view(s.detach()) for s in states)
    hx = negated if len(negated) > 1 else negated[0]
    with generic_loop():
        wanted = flat(module(x, hx))
    for _ in range(2):
        torch.testing.assert_close(flat(module(x, hx)), wanted, rtol=1e-4, atol=1e-5)


def test_kernels_may_be_added_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(TorchRNN):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            raise ZeroDivisionError

    layer, x = LSTM(7, 20), torch.randn(2, 3, 7)
    layer(x)
    monkeypatch.setattr(registry, "KERNELS", [Broken()])
    with pytest.raises(ZeroDivisionError):
        layer(x)
