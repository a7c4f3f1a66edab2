"""What is drawn for a call, and wrong masks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ln_zoo.ops import Noise, draw_noise
from ln_zoo.ops.engines.base import NO_MASKS
from ln_zoo.ops.regularization import bernoulli, zoneout_mix
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec

CPU = torch.device("cpu")


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.97])
def test_shares_are_as_large_as_they_shall_be(p: float) -> None:
    torch.manual_seed(0)
    found = bernoulli(p, (300, 401), CPU)
    assert found.dtype == torch.bool
    assert found.shape == (300, 401)
    # Six deviations.
    bound = 6 * (p * (1 - p) / found.numel()) ** 0.5
    assert abs(found.double().mean().item() - p) < bound
    # Neighbours, which are quarters of one number, tell nothing of each other.
    parts = found.flatten()[: 4 * (found.numel() // 4)].view(-1, 4).double()
    assert (parts.mean(0) - p).abs().max() < 2 * bound
    for a, b in itertools.combinations(parts.T, 2):
        assert abs((a * b).mean().item() - p * p) < 4 * bound


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_any_count_and_the_ends(count: int) -> None:
    assert bernoulli(0.5, (count,), CPU).shape == (count,)
    assert not bernoulli(0.0, (count, 500), CPU).any()
    assert bernoulli(1.0, (count, 500), CPU).all()


def test_probabilities_have_sixteen_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all numbers of 16 bits, as many are below as the nearest multiple of 2^-16 says."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: every.view(torch.int64))
    for p in (0.0, 2**-17, 2**-16, 0.1, 0.5, 1 - 2**-16, 1 - 2**-18):
        assert bernoulli(p, (2**16,), CPU).sum() == round(p * 2**16)


def test_a_seed_gives_the_same_masks_in_every_precision_and_layout() -> None:
    def drawn(dtype: torch.dtype, lead: tuple[int, ...]) -> list[Noise]:
        torch.manual_seed(5)
        states = [torch.zeros(2, 4, size, dtype=dtype) for size in (3, 6)]
        return draw_noise((0.4, 0.2), 0.5, states, lead, training=True)

    padded, packed = drawn(torch.float32, (7, 4)), drawn(torch.bfloat16, (28,))
    assert len(padded) == 2
    for one, two in zip(padded, packed, strict=True):
        assert one.dropout.dtype == two.dropout.dtype == torch.float32
        assert torch.equal(one.dropout, two.dropout)
        for a, b, size in zip(one.zoneout, two.zoneout, (3, 6), strict=True):
            assert a.shape == (7, 4, size)
            assert torch.equal(a.flatten(0, 1), b)
    assert not torch.equal(padded[0].dropout, padded[1].dropout)


def test_evaluation_has_the_expectation() -> None:
    before = torch.get_rng_state()
    assert draw_noise([0.0, 0.3], 0.5, [torch.zeros(1, 2, 3)] * 2, (5, 2), training=False) == [
        Noise(None, (0.0, 0.3))
    ]
    assert torch.equal(before, torch.get_rng_state())
    a, b = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0])
    assert zoneout_mix(a, b, 0.25).tolist() == [2.5, 3.25]
    assert zoneout_mix(a, b, torch.tensor([True, False])).tolist() == [1.0, 5.0]
    assert zoneout_mix(a, b, 0.0) is b


def test_nothing_that_stays_is_touched_by_what_does_not() -> None:
    """A state that stays is exact, and no NaN that a step made gets into it."""
    a, b = torch.tensor([0.1, 2.0]), torch.tensor([float("nan"), float("inf")])
    assert zoneout_mix(a, b, torch.tensor([True, True])).equal(a)


T, N, H = 4, 3, 5
PLAIN = Rows()


def call(engine: str, spec: Spec, **masks: Any) -> None:
    gates = spec.gates * H
    operands = Operands(
        x=torch.randn(T, N, 2),
        w_ih=torch.randn(gates, 2),
        w_hh=torch.randn(gates, H),
        h0=torch.zeros(N, H),
        c0=torch.zeros(N, H) if spec.cell == "LSTM" else None,
        gain_recurrent=torch.ones(gates) if spec.recurrent.scale else None,
    )
    given = (None,) * 3
    torch.ops.ln_zoo.recurrence(
        *operands, *given, *NO_MASKS._replace(**masks), None, *spec.numbers(), engine, False
    )


LSTM = Spec("LSTM", PLAIN, PLAIN, PLAIN)
WRONG = [
    (LSTM, {"zoneout_h": torch.ones(T, N, H)}, r"zoneout_h .*torch\.bool.*torch\.float32"),
    (LSTM, {"zoneout_h": torch.ones(T, N, H + 1).bool()}, r"zoneout_h .*\(4, 3, 5\).*\[4, 3, 6\]"),
    (LSTM, {"zoneout_h": torch.ones(T * N, H).bool()}, r"zoneout_h .*\[12, 5\]"),
    (LSTM, {"zoneout_c": torch.ones(T, N + 1, H).bool()}, r"zoneout_c .*\[4, 4, 5\]"),
    (LSTM, {"dropout": torch.ones(N, H).bool()}, r"dropout .*torch\.float32.*torch\.bool"),
    (LSTM, {"dropout": torch.ones(H)}, r"dropout .*\(3, 5\).*\[5\]"),
    (LSTM, {"dropout": torch.ones(N, H, device="meta")}, "dropout .*meta"),
    (
        Spec("GRU", PLAIN, PLAIN, PLAIN),
        {"zoneout_c": torch.ones(T, N, H).bool()},
        "Expected no zoneout_c, since GRU has no c",
    ),
    (
        Spec("GRU", PLAIN, Examples(True, 1e-5), PLAIN),
        {"zoneout_h": torch.ones(T, N, H).bool()},
        "aten has neither zoneout nor recurrent dropout",
    ),
]


@pytest.mark.parametrize(("spec", "masks", "message"), WRONG, ids=[m for *_, m in WRONG])
def test_wrong_masks(spec: Spec, masks: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call("aten", spec, **masks)
