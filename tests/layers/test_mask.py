"""`mask=`: sequences padded at their ends, as each of them runs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_results import flat, made
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from ln_zoo.layers import GRU, LSTM, RNN

LENGTHS, E, H = (4, 7, 1), 3, 5
N, T = len(LENGTHS), max(LENGTHS)
MASK = torch.arange(T).unsqueeze(1) < torch.tensor(LENGTHS)


@pytest.mark.parametrize("resets", [False, True], ids=["", "resets"])
@pytest.mark.parametrize("first", [False, True], ids=["", "batch first"])
@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_every_sequence_as_alone(cls: type, first: bool, resets: bool) -> None:
    """And no gradient comes from, or goes to, the padding."""
    layer = made(cls, num_layers=2, bidirectional=True, batch_first=first)
    x = torch.randn(T, N, E, dtype=torch.float64, requires_grad=True)
    h = torch.randn(4, N, H, dtype=torch.float64)
    reset = torch.rand(T, N) < 0.4 if resets else None

    def run(x: Tensor, h: Tensor, reset: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x, reset = (a.transpose(0, 1) if first and a is not None else a for a in (x, reset))
        output, *states = flat(layer(x, (h, h) if cls is LSTM else h, reset=reset, **options))
        return output.transpose(0, 1) if first else output, *states

    output, *states = run(x, h, reset, mask=MASK.t() if first else MASK)
    assert output.shape == (T, N, 2 * H)
    assert not output[~MASK].any()
    for n, length in enumerate(LENGTHS):
        part = slice(None, length), slice(n, n + 1)
        flags = None if reset is None else reset[part]
        alone, *ends = run(x[part], h[:, n : n + 1], flags)
        torch.testing.assert_close(output[part], alone)
        torch.testing.assert_close([s[:, n : n + 1] for s in states], ends)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    assert gradient[MASK].abs().amin(-1).gt(0).all()
    assert not gradient[~MASK].any()


def test_without_padding_it_changes_nothing() -> None:
    layer, x = made(GRU), torch.randn(T, N, E, dtype=torch.float64)
    mask = torch.ones(T, N, dtype=torch.bool)
    torch.testing.assert_close(layer(x, mask=mask), layer(x))


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        (MASK.float(), r"\(7, 3\).* in torch.float32"),
        (MASK.t(), r"got \(3, 7\)"),
        (MASK.flip(0), r"\[0, 2\]"),  # padding at the start
        (MASK & (torch.arange(3) != 1), r"\[1\]"),  # no step at all
    ],
    ids=["float", "other layout", "start", "empty"],
)
def test_masks_that_do_not_fit(mask: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=rf"GRU: mask .*{named}"):
        made(GRU)(torch.randn(T, N, E, dtype=torch.float64), mask=mask)


def test_other_input_has_no_mask() -> None:
    x = torch.randn(T, E, dtype=torch.float64)
    for given in (x, pack_sequence([x])):
        with pytest.raises(ValueError, match="RNN: mask"):
            made(RNN)(given, mask=torch.ones(T, dtype=torch.bool))
