"""Where data modules keep what they made of files, so that the next start finds it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


def cache_folders(beside: Path) -> Iterator[Path]:
    """Folders in which what was made of a folder's files may be kept, the place of choice first.

    With ``LN_ZOO_CACHE`` set there is one: a folder of its own in there. Otherwise they are
    ``.cache`` in the folder itself, if it is the user's own and can be written, and a folder of its
    own in ``~/.cache/ln_zoo``. None of them need exist.

    Args:
        beside: the folder of the files.
    """
    if not os.environ.get("LN_ZOO_CACHE") and _is_own(beside):
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


def _is_own(folder: Path) -> bool:
    """Whether a folder is this user's and can be written; shared data stay as they are."""
    status = folder.stat()
    # An administrator may write where permissions let nobody write, and should not.
    can_be_written = os.access(folder, os.W_OK) and status.st_mode & 0o222
    return bool(can_be_written) and (not hasattr(os, "geteuid") or status.st_uid == os.geteuid())
