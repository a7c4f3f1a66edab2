"""Native kernels in a wheel: one library per instruction set."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path

from ln_zoo.kernels.native.compiler import (
    ARCHITECTURE,
    LEVELS,
    MANIFEST,
    Level,
    Made,
    Unavailable,
    checksum,
)

FOLDER = Path(__file__).with_name("libraries")


def levels_for(features: Collection[str]) -> list[Level]:
    """Levels that a processor with these features can run, fastest first."""
    return [level for level in LEVELS.get(ARCHITECTURE, ()) if level.features <= {*features}]


def read_manifest(folder: Path) -> dict[str, tuple[Path, Made]]:
    """Libraries of a folder by level; empty without a manifest.

    Unavailable if the manifest is invalid, or for another system.
    """
    file = folder / MANIFEST
    if not file.exists():
        return {}
    try:
        manifest = json.loads(file.read_text())
        built_for, here = manifest["system"], [sys.platform, ARCHITECTURE]
        libraries = {
            name: (folder / entry.pop("file"), Made(**entry | {"flags": tuple(entry["flags"])}))
            for name, entry in manifest["libraries"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unavailable(f"{file} is damaged ({error!r}); reinstall ln-zoo") from None
    if built_for != here:
        raise Unavailable(
            f"the kernels in {folder} are for {' '.join(built_for)}, this is {' '.join(here)}; "
            "reinstall ln-zoo with pip on this machine"
        )
    return libraries


def find(folder: Path, levels: Collection[Level], troubles: list[str]) -> list[tuple[Path, Made]]:
    """Valid libraries for these levels, in order; problems are appended to ``troubles``."""
    try:
        libraries = read_manifest(folder)
    except Unavailable as error:
        troubles.append(error.reason)
        return []
    wanted = [libraries[level.name] for level in levels if level.name in libraries]
    found = [(path, made) for path, made in wanted if _is_whole(path, made)]
    if damaged := [path.name for path, made in wanted if (path, made) not in found]:
        troubles.append(f"damaged or missing in {folder}: {', '.join(damaged)}; reinstall ln-zoo")
    return found


def _is_whole(path: Path, made: Made) -> bool:
    try:
        return checksum(path) == made.sha256
    except OSError:
        return False
