"""Implementation of ``from_pretrained``, ``save_pretrained`` and ``push_to_hub`` of models."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from ln_zoo.models.base import ZooModule
from ln_zoo.norms import from_config
from ln_zoo.utils.training_runs import UNKNOWN, dataset_metadata
from ln_zoo.zoo import cards, catalog, publishing, registry, source
from ln_zoo.zoo.catalog import Card, CardError
from ln_zoo.zoo.hub import HubOptions

_M = TypeVar("_M", bound=ZooModule)


def load_as(
    cls: type[_M],
    name_or_path: str | os.PathLike[str],
    revision: str | None = None,
    **options: Any,
) -> _M:
    """A published model of a class; options as for `ln_zoo.load`."""
    of_hub = {f.name: options[f.name] for f in fields(HubOptions) if f.name in options}
    card = source.find_card(name_or_path, revision, HubOptions(**of_hub))
    ours, abstract = registry.MODELS.get(card.model), inspect.isabstract(cls)
    foreign = ours is None and cls in registry.MODELS.values()
    if foreign or (ours and not issubclass(ours, cls) and (abstract or not issubclass(cls, ours))):
        raise CardError(
            f"{card.name} is a {card.model}, not a {cls.__name__}: take that class, or "
            "ln_zoo.load, which finds it"
        )
    if not abstract and (ours is None or issubclass(cls, ours)):
        options.setdefault("model", cls)
    model = source.load(card.folder, **options)
    assert isinstance(model, cls)
    return model


def save(
    model: ZooModule,
    folder: str | os.PathLike[str],
    *,
    metrics: Mapping[str, float] | None = None,
    data: Any = None,
    facts: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Implementation of `ln_zoo.models.ZooModule.save_pretrained`."""
    origin: Card | None = model.__dict__.get("card")
    if origin is not None and metrics is None and data is None and _is_that(model, origin):
        if facts is not None:
            raise CardError(
                f"these are the weights of {origin.name}, whose card is kept unchanged: facts can "
                "be given only for weights that were trained or measured after loading"
            )
        files = {key: origin.folder / key for key in origin.config.files}
        files.pop(catalog.WEIGHTS)
        files.pop(catalog.VOCABULARY, None)  # it is in the model
        return cards.write_card(
            folder,
            model,
            {k: v for k, v in asdict(origin.results).items() if k != "format_version"},
            preprocessing=origin.preprocessing,
            name=name,
            files=files,
            overwrite=overwrite,
        )
    if data is None or isinstance(data, Mapping):
        described = {"dataset": "unknown data", **(data or {})}
    else:
        described = dataset_metadata(data)
    kept = {} if origin is None else origin.preprocessing
    runs = model.training_runs
    if origin is not None and runs == origin.training_runs and not _is_that(model, origin):
        runs = (*runs, UNKNOWN)  # trained without a Trainer
    return cards.write_measured(
        folder,
        model,
        {} if metrics is None else metrics,
        data=described,
        preprocessing=getattr(data, "preprocessing", kept),
        evaluation={"versions": {"torch": str(torch.__version__)}},
        training=cards.training_facts(runs),
        facts=facts,
        name=name,
        overwrite=overwrite,
    )


def push(
    model: ZooModule,
    repo_id: str,
    **options: Any,
) -> publishing.Publication:
    """Implementation of `ln_zoo.models.ZooModule.push_to_hub`: options of `save` and `publish`."""
    names = ("metrics", "data", "facts", "name")
    saved = {name: options.pop(name) for name in names if name in options}
    with tempfile.TemporaryDirectory() as folder:
        name = saved.pop("name", None) or repo_id.rpartition("/")[2]
        path = save(model, Path(folder) / "card", name=name, **saved)
        return publishing.publish(
            str(path),
            repo_id,
            norm=from_config(norm) if (norm := model.hparams.get("norm")) else None,
            model=type(model),
            **options,
        )


def _is_that(model: ZooModule, card: Card) -> bool:
    """Whether a model still has the class, norm and weights of its card."""
    if card.model != registry.model_name(type(model)):
        return False
    norm = card.config.init_args.get("norm")
    if norm is not None:
        encoded = registry.encode_norm(model.hparams["norm"])
        # Cards of older versions have fewer arguments; the others have their defaults.
        known = {key: encoded["init_args"].get(key) for key in norm["init_args"]}
        if (encoded["class"], known) != (norm["class"], norm["init_args"]):
            return False
    state = model.state_dict()
    stored = source.read_weights(card)
    return state.keys() == stored.keys() and all(
        value.shape == stored[key].shape and torch.equal(value.cpu(), stored[key].to(value.dtype))
        for key, value in state.items()
    )
