"""Checks of arguments, shared by `DataCase` and `CallbackCase`."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from jsonargparse import ArgumentParser


class ArgumentCase:
    """Errors name argument and value, and every argument has a description."""

    #: Invalid values by argument. Errors must name the argument and the value.
    invalid: ClassVar[dict[str, tuple[Any, ...]]] = {}
    _always_invalid: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def _made(self, **arguments: Any) -> Any:
        raise NotImplementedError

    def test_invalid_arguments_are_named(self) -> None:
        for name, values in {**self._always_invalid, **self.invalid}.items():
            for value in values:
                with pytest.raises((TypeError, ValueError), match=name) as refused:
                    self._made(**{name: value})
                assert str(value) in str(refused.value), (
                    f"{name}={value!r}: the message must show the value: {refused.value}"
                )

    def test_arguments_are_described(self) -> None:
        cls = type(self._made())
        parser = ArgumentParser()
        parser.add_class_arguments(cls, "it")
        for action in parser._actions:
            if action.dest.startswith("it."):
                assert action.help, f"{cls.__name__}: {action.dest[3:]} has no description"
