"""The options of ``ln-zoo fit|validate|test|predict`` as the user gave them. Imports no torch.

They are read before the parser runs, to find the model of weights or a checkpoint, to detect
mistakes early, and to report options that are ignored.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ln_zoo.utils.files import check_checkpoint
from ln_zoo.utils.names import nearest
from ln_zoo.utils.package_data import config_names, find_config
from ln_zoo.utils.yaml import parse_yaml

#: Options that take no value.
_FLAGS = ("--help", "-h", "--print_config")
#: Options that exclude each other: one given as an argument replaces the other in a file.
_START = ("weights", "ckpt_path")
#: Bytes of a file's name, on usual file systems.
_LONGEST_NAME = 255


class Option(NamedTuple):
    """One option as the user gave it."""

    name: str  # such as `model.norm.eps`, without `init_args` and `class_path`
    value: Any  # parsed as YAML
    where: str = ""  # the argument or the environment variable; empty for a file


class Arguments:
    """All options of the environment, of configurations and of arguments, in this order.

    ``argv`` starts with the subcommand.

    Raises:
        FileNotFoundError: if a configuration file does not exist.
        ValueError: if a configuration is not valid YAML, or a class is not named by text.

    Example:
        >>> given = Arguments(["fit", "--model.lr=1", "--data", "Digits"])
        >>> given.options
        [Option(name='model.lr', value=1, where='--model.lr=1'),
         Option(name='data', value='Digits', where='--data Digits')]
    """

    def __init__(self, argv: list[str]) -> None:
        argv = list(_with_configs(argv))
        self.argv = argv
        self.command = argv[0]
        self.options: list[Option] = []
        self._bare: set[str] = set()
        prefix = f"LN_ZOO_{self.command}__".upper()
        arguments = list(_arguments(argv))
        texts = [os.environ[v] for v in ("LN_ZOO_CONFIG", f"{prefix}CONFIG") if v in os.environ]
        texts += [value for name, value, _ in arguments if name in ("--config", "-c") and value]
        for variable, text in os.environ.items():
            if variable.startswith(prefix):
                name = variable.removeprefix(prefix).lower().replace("__", ".")
                self.options += _flat(name, _value(text), variable)
        for configuration in map(_configuration, texts):
            for key, value in configuration.items():
                self.options += _flat(str(key), value)
            self._bare |= {
                group
                for group in ("model", "data")
                if isinstance(inner := configuration.get(group), dict) and "class_path" not in inner
            }
        for name, text_, tokens in arguments:
            if name in ("--config", "-c"):
                continue
            name = name.lstrip("-") if name.startswith("-") else ""
            self.options += _flat(name, None if text_ is None else _value(text_), tokens)

    def last(self, name: str) -> Any:
        """The value of an option; arguments win over files, files over the environment."""
        return next((each.value for each in reversed(self.options) if each.name == name), None)

    def has(self, name: str) -> bool:
        return any(each.name == name for each in self.options)

    def sets(self, name: str) -> bool:
        """Whether an option or one of its parts is given, such as ``model.norm.eps``."""
        return any(f"{each.name}.".startswith(f"{name}.") for each in self.options)

    def start(self) -> dict[str, str | None]:
        """``weights`` and ``ckpt_path``; at least one is None.

        FileNotFoundError for a missing checkpoint. ValueError if both are given, unless one is an
        argument and the other from a file.
        """
        found = {name: self.last(name) or None for name in _START}
        if None not in found.values():
            asked = [g.name for g in self.options if g.name in _START and g.where[:2] == "--"]
            if len(set(asked)) != 1:
                raise ValueError(
                    "--ckpt_path resumes a run, --weights starts a new one: give one of them"
                )
            found = {name: value if name in asked else None for name, value in found.items()}
        for name, value in found.items():
            if any(len(os.fsencode(part)) > _LONGEST_NAME for part in str(value).split(os.sep)):
                raise ValueError(f"--{name} {value} is too long: give a name or a shorter path")
        path = found["ckpt_path"]
        if path not in (None, "last"):
            check_checkpoint(str(path))
        return found

    def named(self) -> set[str]:
        """All texts that were given; class paths among them may be imported."""
        return {each.value for each in self.options if isinstance(each.value, str)}

    def complete(self, model: dict[str, Any] | None, ckpt_path: str | None = None) -> list[str]:
        """The arguments for the parser, with `Arguments.start`'s weights or checkpoint.

        The model of weights or a checkpoint comes first, so that the user's options override it,
        then classes for files that hold only arguments. Weights and checkpoint come last: a run's
        own ``config.yaml`` holds ``ckpt_path: null``. ``ckpt_path`` replaces ``last``.
        """
        head: dict[str, Any] = {} if model is None else {"model": model}
        for group in self._bare:
            name = self.last(group)
            if group not in head and isinstance(name, str):
                head[group] = {"class_path": name}
        start = self.start()
        if ckpt_path is not None:
            start["ckpt_path"] = ckpt_path
        front = ["--config", json.dumps(head)] if head else []
        asked = [name for name in _START if self.has(name)]
        behind = [f"--{name}={'null' if start[name] is None else start[name]}" for name in asked]
        return [self.command, *front, *self.argv[1:], *behind]


def _arguments(argv: list[str]) -> Iterator[tuple[str, str | None, str]]:
    """Name, value and text of each argument; the name of a stray value is empty."""
    tokens: list[str] = []
    for token in [*argv[1:], "--"]:
        open_ = len(tokens) == 1 and "=" not in tokens[0] and tokens[0] not in _FLAGS
        if tokens and open_ and tokens[0].startswith("-") and not token.startswith("--"):
            tokens.append(token)
            continue
        if tokens:
            name, equals, value = tokens[0].partition("=")
            yield name, value if equals else next(iter(tokens[1:]), None), " ".join(tokens)
        tokens = [token]


def _with_configs(argv: list[str]) -> Iterator[str]:
    """The arguments with paths of configurations in place of their names."""
    before = ""
    for token in argv:
        name, equals, value = token.partition("=")
        if name in ("--config", "-c") and equals:
            yield f"{name}={find_config(value) or value}"
        else:
            yield str(find_config(token) or token) if before in ("--config", "-c") else token
        before = token


def _configuration(text: str) -> dict[str, Any]:
    content = parse_yaml(text)
    if isinstance(content, dict):
        return content
    if os.path.isfile(text):
        raise ValueError(f"{text} holds no options: expected YAML with lines `name: value`")
    if not os.path.exists(text):
        files = [path.name for path in Path(text).parent.glob("*")]
        near = nearest(Path(text).name, files) or nearest(text, config_names())
        raise FileNotFoundError(f"--config {text}: there is no such file{near}")
    # The parser reads pipes that the shell opens for `--config <(...)`.
    if stat.S_ISFIFO(os.stat(text).st_mode) and not text.startswith("/dev/"):
        raise ValueError(f"--config {text} is a pipe, which may never end: give a file")
    return {}


def _value(text: str) -> Any:
    """An argument's value; text that is not YAML is left to the parser."""
    try:
        is_long = text[:1] in ("[", "{") or text.endswith((".yaml", ".yml"))
        value = parse_yaml(text) if is_long else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text
    # YAML would join the lines of a path.
    return text if isinstance(value, str) and "\n" in text else value


def _flat(name: str, value: Any, where: str = "") -> Iterator[Option]:
    if isinstance(value, dict):
        class_path, init_args = value.get("class_path", "?"), value.get("init_args", {})
        if not (isinstance(class_path, str) and class_path):
            raise ValueError(f"{name}.class_path must name a class, got {class_path!r}")
        if not isinstance(init_args, dict):
            raise ValueError(f"{name}.init_args must be a mapping of arguments, got {init_args!r}")
        for key, inner in value.items():
            yield from _flat(f"{name.rstrip('+')}.{key}", inner, where)
        return
    parts = [part for part in name.split(".") if part != "init_args"]
    if parts[-1] == "class_path":
        parts.pop()
    if isinstance(value, list):
        for inner in value:
            if isinstance(inner, dict):
                yield from _flat(name.rstrip("+"), inner, where)
    yield Option(".".join(parts).rstrip("+"), value, where)
