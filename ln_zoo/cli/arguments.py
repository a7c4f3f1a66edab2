"""The options of ``ln-zoo fit|validate|test|predict`` as they were given. Imports no torch."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ln_zoo.files import read_regular

#: Values of a configuration; a few aliases of aliases would make more than memory holds.
_LARGEST = 100_000
#: Bytes of a file of options.
_LARGEST_FILE = 10_000_000
#: Without a value of their own.
_FLAGS = ("--help", "-h", "--print_config")


@dataclass(frozen=True)
class Given:
    """One option as it was given.

    Attributes:
        name: such as ``model.norm.eps``, without the words ``init_args`` between.
        value: text, or what a configuration holds; nothing where an argument has no value, or one
            that is added to a list.
        variable: that of the environment which holds it, if one does.
        argument: the argument, if it is one.
    """

    name: str
    value: Any
    variable: str = ""
    argument: str = ""

    @property
    def content(self) -> Any:
        """The value, read as YAML where it is a text that is not a file of a configuration."""
        from_file = not self.variable and not self.argument
        return self.value if from_file or self.value is None else yaml.safe_load(self.value)


def options(argv: list[str]) -> Iterator[Given]:
    """All options of the environment, of configurations and of arguments, in this order.

    Args:
        argv: arguments, the subcommand first.

    Raises:
        ValueError: for a configuration that is none.

    Example:
        >>> [(o.name, o.value) for o in options(["fit", "--model.lr=1", "--data", "Digits"])]
        [('model.lr', '1'), ('data', 'Digits')]
    """
    prefix = f"LN_ZOO_{argv[0]}__".upper()
    for variable, content in os.environ.items():
        if variable.startswith(prefix):
            name = variable.removeprefix(prefix).lower().replace("__", ".")
            yield Given(name, content, variable=variable)
    for configuration in configurations(argv):
        for key, value in configuration.items():
            yield from _flat(str(key), value)
    for tokens in _arguments(argv):
        name, equals, value = tokens[0].partition("=")
        text: str | None = value if equals else tokens[1] if len(tokens) > 1 else None
        # A value to add to a list has not the type of the list.
        text = None if name.endswith("+") else text
        name = _short(name.lstrip("-").removesuffix("+")) if name.startswith("-") else ""
        yield Given(name, text, argument=" ".join(tokens))


def given(argv: list[str], option: str) -> str | None:
    """The value of a top-level option: of an argument, else of a file, else of the environment."""
    value = None
    for each in options(argv):
        value = each.value if each.name == option else value
    return None if value == "null" else value


def configurations(argv: list[str]) -> list[dict[str, Any]]:
    """The content of the configurations among the arguments and in the environment.

    Raises:
        FileNotFoundError: if a file is not there.
        ValueError: if one of them is not YAML.
    """
    variables = ("LN_ZOO_CONFIG", f"LN_ZOO_{argv[0]}__CONFIG".upper())
    texts = [os.environ[name] for name in variables if name in os.environ]
    for tokens in _arguments(argv):
        name, equals, value = tokens[0].partition("=")
        if name in ("--config", "-c") and (equals or len(tokens) > 1):
            texts.append(value if equals else tokens[1])
    found = []
    for text in texts:
        content = parsed(text)
        if isinstance(content, dict):
            found.append(content)
        elif _is_named_pipe(text):
            raise ValueError(f"--config {text} is a pipe, which may never end: give a file")
        elif os.path.isfile(text):
            raise ValueError(f"{text} holds no options: expected YAML with lines `name: value`")
        elif not os.path.exists(text):
            raise FileNotFoundError(f"--config {text}: there is no such file{_beside(Path(text))}")
    return found


def class_first(argv: list[str]) -> list[str]:
    """The same arguments, with ``--model NAME`` before a configuration of arguments for it.

    ``--config configs/norms/layer.yaml --model MLPClassifier`` means what it says: a norm for that
    model. The parser reads options in order, and cannot take arguments of a class that it does not
    know yet. The same holds for ``--data``.

    Args:
        argv: arguments, the subcommand first.

    Example:
        >>> class_first(["fit", "--config={model: {init_args: {lr: 1}}}", "--model", "DRAW"])
        ['fit', '--model', 'DRAW', '--config={model: {init_args: {lr: 1}}}']
    """
    parts = list(_arguments(argv))
    for group in ("model", "data"):
        named = [_named_class(tokens, group) for tokens in parts]
        if True not in named:
            continue
        mine = named.index(True)
        for place, tokens in enumerate(parts[:mine]):
            content = _configuration(tokens).get(group)
            if isinstance(content, str) or (isinstance(content, dict) and "class_path" in content):
                break  # from here on the class is known
            if isinstance(content, dict):
                parts.insert(place, parts.pop(mine))
                break
    return [*argv[:1], *(token for tokens in parts for token in tokens)]


def weights_last(argv: list[str]) -> list[str]:
    """The same arguments, with ``--ckpt_path`` and ``--weights`` behind all configurations.

    The ``config.yaml`` of a run holds ``ckpt_path: null``. Read after ``--ckpt_path FILE``, that
    would have the model tested with weights that are not trained. That of a run which itself began
    with weights holds them: an argument for the one option takes the place of the other in a file.

    Args:
        argv: arguments, the subcommand first.

    Raises:
        FileNotFoundError: if a configuration is not there.
        ValueError: for a configuration that is none.

    Example:
        >>> weights_last(["test", "--ckpt_path", "last.ckpt", "--config={ckpt_path: null}"])
        ['test', '--config={ckpt_path: null}', '--ckpt_path', 'last.ckpt']
        >>> weights_last(["test", "--config={weights: mlp.none}", "--ckpt_path=last.ckpt"])
        ['test', '--config={weights: mlp.none}', '--ckpt_path=last.ckpt', '--weights=null']
    """
    parts = list(_arguments(argv))
    if not all(tokens[0].startswith("-") for tokens in parts):
        return argv  # not well-formed, which the parser says best
    mine = [tokens for tokens in parts if _name(tokens) in ("--ckpt_path", "--weights")]
    found = [*argv[:1], *(t for tokens in parts if tokens not in mine for t in tokens)]
    found += [token for tokens in mine for token in tokens]
    for name, other in (("ckpt_path", "weights"), ("weights", "ckpt_path")):
        is_argument = any(_name(tokens) == f"--{name}" for tokens in mine)
        from_file = not any(_name(tokens) == f"--{other}" for tokens in mine)
        if is_argument and from_file and given(found, name) and given(found, other):
            found.append(f"--{other}=null")
    return found


def _name(tokens: list[str]) -> str:
    return tokens[0].partition("=")[0]


def _named_class(tokens: list[str], group: str) -> bool:
    """Whether an argument gives the name of a class for a group of options."""
    name, equals, value = tokens[0].partition("=")
    value = value if equals else tokens[1] if len(tokens) > 1 else ""
    plain = all(part.isidentifier() for part in value.split("."))
    return name in (f"--{group}", f"--{group}.class_path") and plain and not os.path.isfile(value)


def _configuration(tokens: list[str]) -> dict[str, Any]:
    """The content of an argument that is a configuration; nothing of any other."""
    name, equals, value = tokens[0].partition("=")
    if name not in ("--config", "-c") or not (equals or len(tokens) > 1):
        return {}
    content = parsed(value if equals else tokens[1])
    return content if isinstance(content, dict) else {}


def _is_named_pipe(text: str) -> bool:
    """Whether a path is of a pipe, but for those that a shell opens, as in ``--config <(...)``."""
    try:
        is_pipe = stat.S_ISFIFO(os.stat(text).st_mode)
    except (OSError, ValueError):  # ValueError: no path at all
        return False
    return is_pipe and not text.startswith("/dev/") and os.path.exists(os.path.realpath(text))


def check_checkpoint(path: str) -> None:
    """Raises FileNotFoundError unless there is such a file."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"there is no checkpoint {path!r}: give a file, or `last` for the newest run of the "
            "same name"
        )


def parsed(text: str) -> Any:
    """What a file, or a text in its place, holds as YAML.

    Raises:
        ValueError: if it is none.
    """
    is_file = os.path.isfile(text)  # copes with any text
    where = text if is_file else "the configuration"
    try:
        content = yaml.load(
            read_regular(text, _LARGEST_FILE).decode("utf-8") if is_file else text, _OnceLoader
        )
        size = _size(content, {})
    except _TwiceError as error:
        raise ValueError(f"{where}, {error}") from error
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{where}{line} is not YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read as YAML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{where} nests lists or mappings too deeply to be read") from error
    if size > _LARGEST:
        raise ValueError(
            f"{where} holds more than {_LARGEST:,} values where its aliases are written out"
        )
    return content


class _TwiceError(Exception):
    """A key that a mapping has twice."""


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that appears twice, of which YAML's reader would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            # What is merged from elsewhere ("<<") is there to be overridden.
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                line = key.start_mark.line + 1
                if key.value in lines:
                    first = lines[key.value]
                    raise _TwiceError(
                        f"line {line}: duplicate key {key.value!r}, first given in line {first}"
                    )
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def _size(content: Any, known: dict[int, int]) -> int:
    """How many values there are with all aliases written out; one that holds itself never ends."""
    if not isinstance(content, dict | list):
        return 1
    if id(content) not in known:
        known[id(content)] = _LARGEST  # while it is inside itself
        inner = content.values() if isinstance(content, dict) else content
        known[id(content)] = 1 + sum(_size(value, known) for value in inner)
    return known[id(content)]


def _arguments(argv: list[str]) -> Iterator[list[str]]:
    """Each option with the value that follows it; what follows no option by itself."""
    tokens: list[str] = []
    for token in argv[1:]:
        takes_value = len(tokens) == 1 and "=" not in tokens[0] and tokens[0] not in _FLAGS
        if tokens and takes_value and not token.startswith("--"):
            tokens.append(token)
            continue
        if tokens:
            yield tokens
        tokens = [token]
    if tokens:
        yield tokens


def _flat(name: str, value: Any) -> Iterator[Given]:
    """The options that a part of a configuration holds."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif name.endswith("+"):
        yield Given(_short(name.removesuffix("+")), None)  # has not the type of the list
    else:
        yield Given(_short(name), value)


def _short(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "init_args")


def _beside(path: Path) -> str:
    """A file of a name like this one in the same folder, for messages."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.parent / found[0])!r}?" if found else ""
