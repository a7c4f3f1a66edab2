"""A model from the arguments and weights of a card, within the limits that the weights set."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ln_zoo.models.base import ZooModule
from ln_zoo.utils.files import open_regular
from ln_zoo.zoo.catalog import Card, CardError

#: Upper bounds for untrusted weights: tensors, and bytes of their names and sizes; ours have 32.
_MAX_TENSORS, _MAX_HEADER = 10_000, 4_000_000


class _Limited(TorchFunctionMode):
    """Abort a build that calls torch more often than the number of weights explains."""

    def __init__(self, where: str, tensors: int) -> None:
        super().__init__()
        self.left = 1000 + 100 * tensors
        self.message = (
            f"{where} describes a far larger model than its {tensors} tensors are of: it was "
            "written by hand, or is damaged"
        )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.left -= 1
        if self.left < 0:
            raise CardError(self.message)
        return func(*args, **(kwargs or {}))


def check_header(path: Path) -> None:
    """Raise CardError if a safetensors file lists more than any model has, before it is read."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise CardError(f"{path} has a header of {size:,} bytes, more than any model needs")


def check_size(
    build: Callable[[], ZooModule],
    where: str,
    state: Mapping[str, Tensor],
    parameters: int | None,
    is_own: bool,
) -> None:
    """Build a model on the meta device and compare it with its weights.

    A file may claim any size; this costs neither the memory nor the time of such a model.
    ``parameters`` is the number that a card states; ``is_own`` that the class is the user's, which
    may need numbers to be built.
    """
    if len(state) > _MAX_TENSORS:
        raise CardError(f"{where} holds {len(state):,} tensors, more than any model")
    limit = _Limited(where, len(state))
    try:
        with warnings.catch_warnings(action="ignore"), limit, torch.device("meta"):
            sketch = build()
    except CardError:
        if limit.left < 0 or not is_own:
            raise
        return
    count = sum(parameter.numel() for parameter in sketch.parameters())
    if parameters not in (None, count):
        raise CardError(
            f"{where} says {parameters:,} parameters, the model it describes has {count:,}: the "
            "card was written by hand, or by another ln_zoo"
        )
    check_fits(sketch, state, where)


def check_fits(model: torch.nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Raises CardError, naming the keys, unless the state has the model's keys and shapes."""
    expected = model.state_dict()
    differing = [f"{k} is missing" for k in expected if k not in state]
    differing += [f"{k:.80} is not in the model" for k in state if k not in expected]
    differing += [
        f"{k} is {tuple(state[k].shape)}, the model has {tuple(expected[k].shape)}"
        for k in expected
        if k in state and state[k].shape != expected[k].shape
    ]
    if differing:
        more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise CardError(
            f"the weights of {where} do not fit this {type(model).__name__}, which has another "
            f"norm or size: {'; '.join(differing[:8])}{more}"
        )


def with_head(trained: ZooModule, card: Card, num_classes: int) -> ZooModule:
    """The model with a new head for `num_classes` classes and all other trained weights."""
    if "num_classes" not in trained.hparams or getattr(trained, "head", None) is None:
        raise CardError(
            f"num_classes={num_classes} is for classifiers of images; {card.name} is a "
            f"{type(trained).__name__}, which has no head to replace"
        )
    arguments = {key: value for key, value in trained.hparams.items() if not key.startswith("_")}
    model = type(trained)(**arguments | {"num_classes": num_classes})
    head = head_weights(model)
    below = {k: v for k, v in trained.state_dict().items() if k not in head}
    model.load_state_dict(below, strict=False)
    model.new_weights = head
    rank_zero_info(f"{card.name}: new weights for {num_classes} classes: {', '.join(head)}")
    return model


def head_weights(model: ZooModule) -> tuple[str, ...]:
    """Names in the state dict of the parameters of a classifier's head; () without a head."""
    head = getattr(model, "head", None)
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if module is head)
    return tuple(name for name in model.state_dict() if name.startswith(prefixes))
