"""Files that nobody but this user (or root) can have written, and that are there as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path


class Unusable(Exception):
    """A folder that cannot hold files of ours, with the reason."""


def own(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for this user alone.

    Raises:
        Unusable: it is there, and others could have put something into it.
    """
    for part in (*reversed(folder.parents), folder):
        part.mkdir(mode=0o700, exist_ok=True)
    if reason := distrust(folder):
        raise Unusable(reason)


def distrust(path: Path) -> str | None:
    """Why others could have put a file or folder here, or something into it; None if they could not."""
    # In a sticky folder, like /tmp, others can add entries but not replace ours.
    return suspect(path.parent, os.stat, sticky_is_fine=True) or suspect(path, os.stat)


def suspect(
    path: Path, look: Callable[[Path], os.stat_result] = os.lstat, sticky_is_fine: bool = False
) -> str | None:
    """Why a file or folder is not this user's alone; None if it is, or if it cannot be reached at all."""
    try:
        itself, found = os.lstat(path), look(path)
    except OSError:
        return None
    if not hasattr(os, "getuid"):
        return None
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link; remove it"
    for uid in (itself.st_uid, found.st_uid):  # whose link it is can lead it elsewhere at any time
        if uid not in (0, os.getuid()):
            return f"{path} belongs to another user (uid {uid})"
    if found.st_mode & 0o022 and not (sticky_is_fine and found.st_mode & stat.S_ISVTX):
        return f"{path} can be written by other users; run: chmod go-w {path}"
    return None


def write(path: str | Path, text: str, mode: int = 0o666) -> None:
    """Write a file as a whole or not at all; `mode` is what the umask leaves of it."""
    path = Path(path).resolve()
    if path.exists() and not path.is_file():  # a pipe or a terminal, which nothing may take the place of
        path.write_text(text, encoding="utf-8")
        return
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(made, "x", encoding="utf-8", opener=partial(os.open, mode=mode)) as file:
            file.write(text)
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def written(what: str, text: str, path: str | Path | None) -> str:
    """The text, in a file too where one is named; one that can't be written is one clear error."""
    try:
        if path is not None:
            write(path, text)
    except OSError as error:
        raise ValueError(f"{what}: can't write {path}: {error.strerror or error}") from error
    return text
