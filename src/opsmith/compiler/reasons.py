"""Why something takes no part, in words."""

from __future__ import annotations

import re
from textwrap import shorten


def raised(error: Exception) -> str:
    """An exception as a reason: its kind and the first line of what it says."""
    return f"raised {one_line(error)}"


def one_line(error: BaseException) -> str:
    """The kind of an exception, and the first line of what it says, cut at a word."""
    first = str(error).strip().partition("\n")[0]
    what = {KeyboardInterrupt: "interrupted", SystemExit: "the program exited"}.get(type(error))
    return shorten(f"{what or type(error).__name__}{first and ': '}{first}", 240, placeholder=" ...")


def broken(reason: str) -> str:
    """Why a graph ends, of all that Dynamo says of it: its name for that, and which call or operator it was."""
    if reason.startswith(("generic_jump", "Data-dependent branching")):
        return "branching on the value of a tensor"
    title, more = reason.partition("\n")[0], re.search(r"(?:Explanation|context): (\S.*)", reason)
    return shorten(f"{title}: {more[1]}" if more else title, 240, placeholder=" ...")
