"""JSON as prototypes are published: with comments and trailing commas, and with the line of every value kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]

_DEEPEST = 32
_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_SCALAR = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])|(?:true|false|null)\b")


class PrototypeError(ValueError):
    """What is wrong with a prototype: the field, its line, what was found and what is allowed."""


def parse(text: str, where: str) -> tuple[Any, dict[Path, int]]:
    """The value of a JSON text, and the line on which the value at each path begins.

    >>> parse('{"op": "Add", // a comment' + chr(10) + '"attr": [1, 2,],}', "add.json")[1][("attr", 1)]
    2

    Raises:
        PrototypeError: what is no JSON, an object with one name twice, or more than 32 levels.
    """
    return _Parser(text, where).whole()


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at = text, where, 0
        self.lines: dict[Path, int] = {}
        self.line, self.counted = 1, 0

    def whole(self) -> tuple[Any, dict[Path, int]]:
        value = self.value(())
        self.skip()
        if self.at < len(self.text):
            raise self.wrong("the end of the file")
        return value, self.lines

    def skip(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None  # it matches nothing, too
        self.at = found.end()
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at

    def wrong(self, expected: str) -> PrototypeError:
        self.skip()
        found = repr(self.text[self.at : self.at + 20]) if self.at < len(self.text) else "the end of the file"
        return PrototypeError(f"{self.where}: line {self.line}: expected {expected}, found {found}")

    def take(self, token: str) -> bool:
        self.skip()
        if self.text.startswith(token, self.at):
            self.at += len(token)
            return True
        return False

    def value(self, path: Path) -> Any:
        self.skip()
        self.lines[path] = self.line
        if len(path) > _DEEPEST:
            raise self.wrong(f"at most {_DEEPEST} levels of brackets")
        if self.take("{"):
            return self.pairs(path)
        if self.take("["):
            return self.items(path)
        if self.text.startswith('"', self.at):
            return self.string("a string on one line")
        if found := _SCALAR.match(self.text, self.at):
            if len(found[0]) > 64:
                raise self.wrong("a number of at most 64 characters")
            self.at = found.end()
            return json.loads(found[0])
        raise self.wrong("a value: an object, a list, a string, a number, true, false or null")

    def string(self, expected: str) -> str:
        self.skip()
        found = _STRING.match(self.text, self.at)
        if found is None:
            raise self.wrong(expected)
        try:
            value = json.loads(found[0])
        except ValueError:
            raise self.wrong("a string with escapes that JSON knows") from None
        self.at = found.end()
        return str(value)

    def pairs(self, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for _ in self.members("}"):
            key = self.string('a field name in double quotes, or "}"')
            if key in result:
                raise PrototypeError(
                    f"{self.where}: line {self.line}: {shown((*path, key))} is given twice, "
                    f"first on line {self.lines[(*path, key)]}; keep one"
                )
            if not self.take(":"):
                raise self.wrong('":"')
            result[key] = self.value((*path, key))
        return result

    def items(self, path: Path) -> list[Any]:
        return [self.value((*path, i)) for i, _ in enumerate(self.members("]"))]

    def members(self, end: str) -> Iterator[None]:
        """Stops before each member of an object or of a list; a comma may stand behind the last one."""
        while not self.take(end):
            yield
            if not self.take(","):
                if not self.take(end):
                    raise self.wrong(f'"," or "{end}"')
                return


def shown(path: Path) -> str:
    """`input_desc[0].name` for ("input_desc", 0, "name")."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p[:40]}" for p in path).removeprefix(".")
