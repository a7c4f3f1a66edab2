"""A model from the arguments and weights of a card, within the limits that the weights set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ln_zoo.models.base import ZooModule
from ln_zoo.zoo import catalog
from ln_zoo.zoo.catalog import Card, CardError

#: Upper bound for untrusted weights; ours have at most 32 tensors.
_MAX_TENSORS = 10_000


class _Limited(TorchFunctionMode):
    """Abort a build that calls torch more often than the number of weights explains."""

    def __init__(self, card: Card, tensors: int) -> None:
        super().__init__()
        self.left = 1000 + 100 * tensors
        self.message = (
            f"{card.folder / catalog.CONFIG} describes a far larger model than the {tensors} "
            f"tensors of {catalog.WEIGHTS} are of: the card was written by hand, or is damaged"
        )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.left -= 1
        if self.left < 0:
            raise CardError(self.message)
        return func(*args, **(kwargs or {}))


def check_size(
    build: Callable[[], ZooModule], card: Card, state: dict[str, Tensor], is_own: bool
) -> None:
    """Build a model on the meta device and compare it with the weights of its card.

    A card may claim any size; this costs neither the memory nor the time of such a model.
    """
    if len(state) > _MAX_TENSORS:
        raise CardError(
            f"{card.folder / catalog.WEIGHTS} holds {len(state):,} tensors, more than any model"
        )
    limit = _Limited(card, len(state))
    try:
        with limit, torch.device("meta"):
            sketch = build()
    except CardError:
        if limit.left < 0 or not is_own:
            raise
        return
    count = sum(parameter.numel() for parameter in sketch.parameters())
    if count != card.parameters:
        raise CardError(
            f"{card.folder / catalog.CONFIG} says {card.parameters:,} parameters, the model it "
            f"describes has {count:,}: the card was written by hand, or by another ln_zoo"
        )
    check_fits(sketch, state, str(card.path(catalog.WEIGHTS)))


def check_fits(model: torch.nn.Module, state: dict[str, Tensor], where: str) -> None:
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
