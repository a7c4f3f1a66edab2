"""Check that no other user could have written a file that is loaded as code."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

if sys.platform != "win32":  # no kernels on Windows
    import grp
    import pwd


def make_private(folder: Path) -> None:
    """Create a folder and missing parents for this user alone (mode 0700)."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process created it
            place.mkdir(mode=0o700)
    folder.mkdir(exist_ok=True)  # raises if it is a file


def why_not_ours(path: Path) -> str | None:
    """Why other users could write to a folder, in one line, or None; the folder may be missing.

    The folder and its parents must belong to this user or root, and be writable by no one else,
    except for parents with the sticky bit (``/tmp``). A group whose only member is this user counts
    as the user. Links are followed and must belong to this user or root.
    """
    path = path.absolute()
    links = (place for place in (path, *path.parents) if place.is_symlink())
    real = path.resolve()
    for place in (*links, real, *real.parents):
        try:
            state = place.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{place} cannot be examined: {error.strerror}"
        above = place not in (path, real)
        if why := _why(place, state, sticky_will_do=above):
            return why
    return None


def is_our_file(path: Path) -> bool:
    """Whether it is a regular file of this user or root that no one else can write to."""
    state = path.lstat()
    return stat.S_ISREG(state.st_mode) and _why(path, state, sticky_will_do=False) is None


def is_our_folder(path: Path) -> bool:
    """Whether it is a folder of this user, not a link."""
    state = path.lstat()
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()


def _why(path: Path, state: os.stat_result, sticky_will_do: bool) -> str | None:
    if sys.platform == "win32":
        return None
    if state.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user ({_user(state.st_uid)})"
    sticky = sticky_will_do and state.st_mode & stat.S_ISVTX
    if stat.S_ISLNK(state.st_mode) or sticky:
        return None
    if state.st_mode & stat.S_IWOTH:
        return f"every user can write to {path} (chmod go-w {path})"
    if state.st_mode & stat.S_IWGRP and not _is_private(state.st_gid):
        return f"a group of users can write to {path} (chmod g-w {path})"
    return None


def _user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return f"number {number}"


def _is_private(group: int) -> bool:
    """Whether a group belongs to one user: by convention it has the user's name and no members."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
