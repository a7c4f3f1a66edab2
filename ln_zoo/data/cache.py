"""Where data modules keep what they made of files, so that the next start finds it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


def cache_folders(beside: Path) -> Iterator[Path]:
    """Folders in which what was made of a folder's files may be kept, the place of choice first.

    They are ``.cache`` in the folder itself, where it can be written, and a folder of its own in
    the user's cache: ``LN_ZOO_CACHE``, else ``~/.cache/ln_zoo``. None of them need exist.

    Args:
        beside: the folder of the files.
    """
    # An administrator may write where permissions let nobody write, and should not.
    if os.access(beside, os.W_OK) and beside.stat().st_mode & 0o222:
        yield beside / ".cache"
    # The folder in which kernels, which data know nothing of, are kept too.
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    chosen = Path(os.environ.get("LN_ZOO_CACHE") or Path(cache, "ln_zoo"))
    try:
        chosen = chosen.expanduser()
    except RuntimeError:  # a user without a home, as in some containers
        return
    # Files of one name in two folders are two texts: neither may take the other's place.
    origin = hashlib.sha256(os.fsencode(beside.resolve())).hexdigest()
    yield chosen / "data" / origin[:16]
