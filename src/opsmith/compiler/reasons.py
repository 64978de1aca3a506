"""Why something takes no part, in words."""

from __future__ import annotations


def raised(error: Exception) -> str:
    """An exception as a reason: its kind and the first line of what it says."""
    return f"raised {one_line(error, 120)}"


def one_line(error: BaseException, most: int = 200) -> str:
    """The kind of an exception, and the first line of what it says, so many letters of it at most."""
    first = next(iter(str(error).strip().splitlines()), "")
    what = {KeyboardInterrupt: "interrupted", SystemExit: "the program exited"}.get(type(error))
    return f"{what or type(error).__name__}{first and ': '}{first[:most]}"
