"""YAML of users and strangers: no repeated keys, bounded size."""

from __future__ import annotations

import os
from typing import Any

import yaml

from ln_zoo.utils.files import read_bounded

#: Values of a configuration; a few aliases of aliases would make more than memory holds.
_LARGEST = 100_000
#: Bytes of a configuration file.
_LARGEST_FILE = 1_000_000


def parse_yaml(text: str) -> Any:
    """Parse a YAML file or string; ValueError if it is invalid, repeats a key or is too large."""
    is_file = os.path.isfile(text)  # copes with any text
    where = text if is_file else "the configuration"
    try:
        content = yaml.load(
            read_bounded(text, _LARGEST_FILE).decode("utf-8") if is_file else text, _OnceLoader
        )
        size = _size(content, {})
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
        raise ValueError(f"{where} holds more than {_LARGEST:,} values with its aliases expanded")
    return content


class _OnceLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            # Merged keys ("<<") are there to be overridden.
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    first = seen[key.value]
                    raise yaml.MarkedYAMLError(
                        problem=f"duplicate key {key.value!r}, first given in line {first}",
                        problem_mark=key.start_mark,
                    )
                seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _size(content: Any, known: dict[int, int]) -> int:
    """Number of values with all aliases expanded; one that holds itself counts as too many."""
    if not isinstance(content, dict | list):
        return 1
    if id(content) not in known:
        known[id(content)] = _LARGEST  # while it is inside itself
        inner = content.values() if isinstance(content, dict) else content
        known[id(content)] = 1 + sum(_size(value, known) for value in inner)
    return known[id(content)]
