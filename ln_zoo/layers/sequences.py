"""Check masks and resets of padded and packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ln_zoo.ops import Cell, States, check_devices


def lengths_of(
    layer: str, input: Tensor | PackedSequence, mask: Tensor, batch_first: bool
) -> Tensor:
    """Lengths of padded sequences, (N,), on the CPU, from the mask of their valid steps.

    Raises:
        ValueError: unless the mask is boolean, of the input's form, and true at the first steps of
            each sequence, at least at one. The message begins with ``layer``.
    """
    if not isinstance(input, Tensor) or input.dim() != 3:
        raise ValueError(f"{layer}: mask is for padded 3D input; leave it out for other input")
    if mask.dtype != torch.bool or mask.shape != input.shape[:-1]:
        raise ValueError(
            f"{layer}: mask must be boolean, {tuple(input.shape[:-1])}, as this input has "
            f"steps; got {tuple(mask.shape)} in {mask.dtype}"
        )
    by_example = mask.cpu() if batch_first else mask.cpu().t()
    lengths = by_example.sum(1)
    ended = torch.arange(by_example.shape[1], device="cpu") >= lengths.unsqueeze(1)
    wrong = ((by_example & ended).any(1) | (lengths == 0)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"{layer}: mask must be true at the first steps of each sequence, at least at one, "
            f"and false at all later ones; it is not in the sequences {wrong}"
        )
    return lengths


def packed_reset(layer: str, input: PackedSequence, reset: Any) -> Tensor:
    """Flags of packed rows, (total,).

    Raises:
        TypeError: if ``reset`` is not packed.
        ValueError: for other lengths, another order, or another dtype than the input's flags need.
    """
    if not isinstance(reset, PackedSequence):
        raise TypeError(
            f"{layer}: reset must be packed, as the input is, got a {type(reset).__name__}"
        )
    order, given = input.sorted_indices, reset.sorted_indices
    message = f"{layer}: reset must have the lengths and the order of the input"
    same = (order is None) == (given is None) and input.batch_sizes.equal(reset.batch_sizes)
    if same and order is not None and given is not None and order is not given:
        if order.is_cuda:  # asynchronous: comparing here would synchronise
            torch._assert_async(order.eq(given).all(), message)
        else:
            same = order.equal(given)
    if not same:
        raise ValueError(message)
    return check_reset(layer, reset.data, input.data, (len(input.data),))


def padded_reset(layer: str, input: Tensor, reset: Any, batch_first: bool) -> Tensor:
    """Flags of time-major rows, (T * N,), or (T,); TypeError or ValueError as `packed_reset`."""
    if not isinstance(reset, Tensor):
        raise TypeError(
            f"{layer}: reset must be a tensor, as the input is, got {type(reset).__name__}"
        )
    flags = check_reset(layer, reset, input, input.shape[:-1])
    return (flags.t() if batch_first and flags.dim() == 2 else flags).flatten()


def check_reset(layer: str, reset: Tensor, input: Tensor, shape: Sequence[int]) -> Tensor:
    """The flags themselves; ValueError unless they are boolean and of this shape."""
    if reset.dtype != torch.bool or tuple(reset.shape) != tuple(shape):
        raise ValueError(
            f"{layer}: reset must be boolean, {tuple(shape)}, as this input has "
            f"steps; got {tuple(reset.shape)} in {reset.dtype}"
        )
    check_devices(input, reset=reset)
    return reset


def check_batching(cell: Cell, input: Tensor, states: States | None) -> None:
    """RuntimeError unless states have a dimension for examples if and only if the input has."""
    if states is None or all(s.dim() == input.dim() for s in states):
        return
    kind = "batched" if input.dim() == 3 else "unbatched"
    which, got, noun = "hx", f"{states[0].dim()}-D", "tensor"
    if len(states) > 1:
        which, noun = " and ".join(f"{name}x" for name in cell.states), "tensors"
        got = "(" + ", ".join(f"{s.dim()}-D" for s in states) + ")"
    raise RuntimeError(
        f"For {kind} {input.dim()}-D input, {which} should also be {input.dim()}-D "
        f"but got {got} {noun}"
    )
