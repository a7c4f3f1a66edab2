"""Arguments of models: errors name argument and value, and stored arguments rebuild the model."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses

from ln_zoo.models import (
    DRAW,
    AttentiveReader,
    ConvClassifier,
    Handwriting,
    MLPClassifier,
    OrderEmbedding,
    SequenceClassifier,
    SkipThought,
    ZooModule,
)
from ln_zoo.norms import LayerNorm, RMSNorm, Site, to_config

WORDS = ["a", "cat", "@entity0", "rain", "dog"]
#: Arguments that keep each model small.
SMALL: dict[type[ZooModule], dict[str, Any]] = {
    AttentiveReader: {"vocabulary": WORDS, "hidden_size": 4},
    ConvClassifier: {},
    DRAW: {"image_size": (4, 6), "glimpses": 3, "hidden_size": 6, "latent_size": 2},
    Handwriting: {"hidden_size": 7, "window_components": 3, "mixture_components": 2},
    MLPClassifier: {"in_features": 12, "hidden_sizes": [4]},
    OrderEmbedding: {"vocabulary": WORDS, "hidden_size": 5, "embedding_features": 4},
    SequenceClassifier: {"in_features": 12, "hidden_size": 5},
    SkipThought: {"vocabulary": WORDS, "hidden_size": 8, "embedding_features": 5},
}
#: Bad values of each argument.
BAD: dict[type[ZooModule], dict[str, list[Any]]] = {
    AttentiveReader: {
        "hidden_size": [0], "dropout": [1.0], "statistics": ["some"], "initial_state": ["ones"],
        "lr": [0.0],
    },
    ConvClassifier: {
        "image_shape": [(1, 3, 28), (28, 28), (0, 8, 8)], "channels": [[[4], []], []],
        "hidden_size": [0], "num_classes": [0], "optimizer": ["adamw"], "lr": [0.0],
    },
    DRAW: {
        "glimpses": [0], "val_samples": [-1], "eval_samples": [0], "importance_samples": [-1],
        "eval_seed": [-1, 2**32], "lr": [0.0, math.nan], "clip_norm": [0.0],
        "image_size": [(28,), 28], "hidden_size": [0], "filter_norm": ["max"],
        "filter_eps": [-1e-8], "log_clamp": [0.0, 21.0], "normalize": [["gates"]],
        "compile_mode": ["fancy"],
    },
    Handwriting: {
        "alphabet": ["", "abca"], "hidden_size": [0], "output_from": ["none"],
        "optimizer": ["sgd"], "clip_mode": ["hard"], "clip_bound": [0.0], "lr": [-1.0],
        "weight_noise": [-0.1, math.nan], "max_correlation": [1.0], "window_parameters": ["relu"],
        "loss_reduction": ["mean"],
    },
    MLPClassifier: {
        "in_features": [0], "hidden_sizes": [[5, -1]], "num_classes": [0], "activation": ["gelu"],
        "lr": [0.0, math.nan], "norm": ["LayerNorm"],
    },
    OrderEmbedding: {
        "hidden_size": [0], "measure": ["euclid"], "penalty": ["cubed"], "negatives": ["all"],
        "loss_reduction": ["max"], "adam_bias_correction": ["none"], "clip": ["value"],
        "margin": [0.0], "lr": [-1.0], "clip_norm": [0.0], "word_dropout": [1.0],
        "fold_size": [0],
    },
    SequenceClassifier: {
        "cell": ["mogrifier"], "hidden_size": [0], "normalize": [["output"]], "step_features": [5],
        "initial_noise": [-0.1, math.nan, math.inf], "lr": [0.0], "optimizer": ["lion"],
    },
    SkipThought: {
        "hidden_size": [0], "encoder": ["tri"], "conditioning": ["no"], "softmax": ["soft"],
        "loss_reduction": ["mean"], "adam_bias_correction": ["no"], "lr": [-1.0],
    },
}  # fmt: skip
#: Values of another type.
TYPES: dict[type[ZooModule], dict[str, list[Any]]] = {
    ConvClassifier: {"hidden_size": ["many"]},
    DRAW: {"glimpses": [None]},
    Handwriting: {"lr": ["fast"]},
    MLPClassifier: {
        "in_features": ["abc"], "hidden_sizes": [[8, 0.5]], "num_classes": [True], "lr": ["fast"],
    },
    SequenceClassifier: {"num_layers": [1.5]},
}  # fmt: skip
CASES = [
    pytest.param(cls, name, value, error, id=f"{cls.__name__}-{name}-{value}")
    for table, error in ((BAD, ValueError), (TYPES, TypeError))
    for cls, arguments in table.items()
    for name, values in arguments.items()
    for value in values
]


@pytest.mark.parametrize(("cls", "name", "value", "error"), CASES)
def test_an_error_names_argument_and_value(
    cls: Any, name: str, value: Any, error: type[Exception]
) -> None:
    message = refuses(name, cls, error=error, **SMALL[cls] | {name: value})
    (shown,) = value if name == "normalize" else (value,)
    listed = list(value) if isinstance(value, tuple) else shown
    written = str if name == "compile_mode" else repr  # torch's own message has no quotes
    assert written(shown) in message or written(listed) in message


CUTOFFS = {"softmax": "adaptive", "softmax_cutoffs": [9, 5]}


@pytest.mark.parametrize(
    ("cls", "arguments", "words"),
    [
        (AttentiveReader, {"vocabulary": ["a", "b"]}, ["vocabulary", "@entity0"]),
        (AttentiveReader, {"vocabulary": ["a", "a"]}, ["'a'"]),
        (OrderEmbedding, {"vocabulary": ["a", "a"]}, ["'a'"]),
        (ConvClassifier, {"channels": [[4, 0]]}, ["channels", "[4, 0]"]),
        (DRAW, {"image_size": (0, 5)}, ["height", "0"]),
        (MLPClassifier, {"norm": {"class_path": "ln_zoo.norms.No"}}, ["ln_zoo.norms.No"]),
        (SkipThought, {"vocabulary": None}, ["vocabulary"]),
        (SkipThought, {"hidden_size": 7, "encoder": "bi"}, ["hidden_size", "7", "encoder"]),
        (SkipThought, CUTOFFS, ["softmax_cutoffs", "[9, 5]"]),
    ],
)
def test_arguments_that_do_not_fit(cls: Any, arguments: dict[str, Any], words: list[str]) -> None:
    message = refuses("", cls, **SMALL[cls] | arguments)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("cls", "arguments", "expected", "shapes"),
    [
        # 9 x 9 pixels are pooled to 4 x 4 and 2 x 2, as 8 x 8 are.
        (
            ConvClassifier,
            {"image_shape": (1, 8, 8), "channels": [[2], [3]], "hidden_size": 4},
            "(N, 1, 8, 8)",
            [(2, 1, 9, 9), (2, 1, 8, 4), (2, 3, 8, 8), (2, 8, 8), (1, 8, 8), (8, 8), (2, 64)],
        ),
        (DRAW, {}, "(N, 1, 4, 6)", [(2, 1, 6, 4), (2, 4, 6), (2, 2, 4, 6), (2, 1, 24)]),
        (MLPClassifier, {}, "12 numbers", [(3, 4), (12,)]),
        (SequenceClassifier, {}, "12 numbers", [(2, 4, 4)]),
        (SequenceClassifier, {"permuted": True}, "12 numbers", [(2, 4, 4)]),
    ],
)
def test_inputs_of_another_size(
    cls: Any, arguments: dict[str, Any], expected: str, shapes: list[tuple[int, ...]]
) -> None:
    model = cls(**SMALL[cls] | arguments)
    for shape in shapes:
        for training in (True, False):
            message = refuses(re.escape(str(shape)), model.train(training), torch.rand(shape))
            assert expected in message


@pytest.mark.parametrize("cls", [ConvClassifier, MLPClassifier])
def test_an_image_that_is_not_prepared(cls: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"ndarray.*card\.preprocess"):
        cls(**SMALL[cls])(np.zeros((1, 12)))


@pytest.mark.parametrize("cls", SMALL)
def test_stored_arguments_rebuild_the_model(cls: Any) -> None:
    assert cls(**SMALL[cls]).hparams["norm"] == to_config(LayerNorm())
    norm = RMSNorm(eps=1e-3)
    model = cls(**SMALL[cls], norm=norm)
    again = cls(**json.loads(json.dumps(model.hparams)))
    assert again.hparams == model.hparams
    again.load_state_dict(model.state_dict())
    assert norm in {site.norm for site in again.modules() if isinstance(site, Site)}
