"""Arguments of models that are of the wrong type."""

from __future__ import annotations

from typing import Any

import pytest

from ln_zoo.models import (
    DRAW,
    ConvClassifier,
    Handwriting,
    MLPClassifier,
    SequenceClassifier,
)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (MLPClassifier, {"in_features": "abc"}, "in_features must be given in whole numbers, got"),
        (MLPClassifier, {"hidden_sizes": [8, 0.5]}, r"hidden_sizes .* got \[8, 0.5\]"),
        (MLPClassifier, {"num_classes": True}, "num_classes must .* got True"),
        (MLPClassifier, {"lr": "x"}, "lr must be a number, got 'x'"),
        (ConvClassifier, {"hidden_size": "x"}, "hidden_size must be given in whole"),
        (SequenceClassifier, {"num_layers": 1.5}, "num_layers must be given in whole numbers"),
        (DRAW, {"glimpses": None}, "glimpses must be given in whole numbers, got None"),
        (DRAW, {"lr": "x"}, "lr must be a number, got 'x'"),
        (Handwriting, {"hidden_size": "x"}, "hidden_size must be given in whole"),
        (Handwriting, {"lr": "x"}, "lr must be a number, got 'x'"),
    ],
)
def test_types_are_named(model: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        model(**arguments)
