"""Folders of datasets and caches."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

_SHOWN = 8

Key = TypeVar("Key")


def local_folder(root: str | None, name: str) -> Path | None:
    """The given folder, else the dataset's folder in ``$LN_ZOO_DATA``, else None."""
    if root is not None:
        return Path(root).expanduser()
    shared = os.environ.get("LN_ZOO_DATA")
    if not shared:
        return None
    if not Path(shared).is_dir():
        what = "a file" if Path(shared).exists() else "not there"
        raise NotADirectoryError(
            f"LN_ZOO_DATA={shared} must name a folder with a folder {name}, and is {what}: correct "
            "or unset it, or give --data.root (root= in Python)"
        )
    folder = Path(shared, name)
    return folder if folder.is_dir() else None


def check_folder(folder: Path, expected: str) -> None:
    """Raise FileNotFoundError or NotADirectoryError, naming the expected content."""
    if not folder.exists():
        raise FileNotFoundError(f"no folder {folder}: {expected}")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: give its folder; {expected}")


def find_files(
    folder: Path, names: Mapping[Key, Sequence[str]], hint: str, required: bool = False
) -> dict[Key, Path]:
    """The first existing path of each file's alternative names; {} if there is none of any file.

    FileNotFoundError if some files are missing; if ``required`` also if all are.
    """
    found = {}
    for key, choices in names.items():
        paths = [path for path in (folder / name for name in choices) if path.exists()]
        if paths:
            found[key] = paths[0]
    missing = [choices[0] for key, choices in names.items() if key not in found]
    if missing and (found or required):
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}, it has {listing(folder)}: {hint}"
        )
    return found


def listing(folder: Path) -> str:
    """The first names in a folder, for error messages."""
    names = sorted(path.name for path in folder.iterdir())
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}" if names else "nothing"


def cache_folders(data: Path) -> Iterator[Path]:
    """Candidate cache folders for a data folder, the preferred one first; they need not exist.

    A subfolder of ``LN_ZOO_CACHE`` if set; otherwise ``.cache`` in the data folder, if the user
    owns it and can write to it, and a subfolder of ``~/.cache/ln_zoo``.
    """
    if not os.environ.get("LN_ZOO_CACHE") and _is_own(data):
        yield data / ".cache"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    chosen = Path(os.environ.get("LN_ZOO_CACHE") or Path(cache, "ln_zoo"))
    try:
        chosen = chosen.expanduser()
    except RuntimeError:  # a user without a home, as in some containers
        return
    # Two folders may have files of one name.
    origin = hashlib.sha256(os.fsencode(data.resolve())).hexdigest()
    yield chosen / "data" / origin[:16]


def _is_own(folder: Path) -> bool:
    """Whether this user owns a folder and can write to it; shared data stay unchanged."""
    status = folder.stat()
    # root may write anywhere, and should respect the permission bits here.
    can_be_written = os.access(folder, os.W_OK) and status.st_mode & 0o222
    return bool(can_be_written) and (not hasattr(os, "geteuid") or status.st_uid == os.geteuid())
