"""The prototype of an operator: msopgen's JSON as it is, with optional keys of ours.

A prototype is data. Its names become identifiers and file names, so they are held to letters, digits and
underscores; nothing in it is ever evaluated, and what is wrong with it is one message with a field and a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, ValidationError, field_validator

from opsmith.authoring.formula.shapes import ANY, Shape
from opsmith.authoring.prototype import jsonc
from opsmith.authoring.prototype.jsonc import PrototypeError as PrototypeError
from opsmith.authoring.prototype.spellings import FORMATS, GROUPS, KINDS, NAMESPACES, RESERVED, TYPES

_LARGEST = 1 << 20  # bytes
_MOST = 64  # inputs, outputs, attributes, columns
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_CAMEL = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")

# What may stand in a field, where pydantic says it in the words of Python.
_ALLOWED = {"string_type": "a string", "list_type": "a list", "too_short": "one entry at least"}
_ALLOWED |= {"model_type": "an object", "dict_type": "a string or an object", "int_type": "a symbol or size"}

_Strict = ConfigDict(extra="forbid", frozen=True)
_Single = Literal["int", "float", "bool", "string"]
_List = Literal["list_int", "list_float", "list_bool", "list_string", "list_list_int"]
Strings = list[str]


def _identifier(name: str) -> str:
    if not _IDENTIFIER.fullmatch(name):
        raise ValueError("allowed: a letter, then at most 63 ASCII letters, digits and underscores")
    if name in RESERVED or re.match(r"opsmith_|[rv]_|count_|HAS_", name) or name.endswith("_row"):
        raise ValueError(
            "that name has a meaning in Python, C++ or the generated code; allowed: another name"
        )
    return name


class Description(BaseModel):
    """One tensor: an input or an output."""

    model_config = _Strict

    name: str
    param_type: Literal["required", "optional", "dynamic"] = "required"
    format: Strings = Field(default=["ND"], min_length=1, max_length=_MOST)
    type: Strings = Field(min_length=1, max_length=_MOST)
    shape: list[StrictInt | str] | None = Field(default=None, max_length=16)

    _lists = field_validator("format", "type", mode="before")(lambda v: [v] if isinstance(v, str) else v)
    _named = field_validator("name")(_identifier)

    @field_validator("format")
    @classmethod
    def _known_formats(cls, formats: Strings) -> Strings:
        if unknown := [f for f in formats if f not in FORMATS]:
            raise ValueError(f"{unknown[0]!r} is no format; allowed: {', '.join(FORMATS)}")
        return formats

    @field_validator("type")
    @classmethod
    def _known_types(cls, names: Strings) -> Strings:
        types: list[str] = []
        for name in names:
            if name in TYPES:
                types.append(TYPES[name])
            elif name.lower() in GROUPS:
                types.extend(GROUPS[name.lower()])
            else:
                known = ", ".join((*TYPES, *GROUPS))
                raise ValueError(f"{name!r} is neither a type nor a group of types; allowed: {known}")
        return types

    @field_validator("shape")
    @classmethod
    def _symbols(cls, shape: list[int | str] | None) -> list[int | str] | None:
        for i, dim in enumerate(shape or ()):
            if dim == ANY and i == 0:
                continue
            if isinstance(dim, str) and (not _IDENTIFIER.fullmatch(dim) or dim in RESERVED):
                raise ValueError(
                    f"{dim!r} is no symbol; allowed: names such as B or N, sizes from 1, and '...' in front"
                )
            if isinstance(dim, int) and not 1 <= dim <= 1 << 31:
                raise ValueError(f"{dim} is no size; allowed: 1 to {1 << 31}")
        if shape == [ANY]:
            raise ValueError("'...' needs a last axis behind it; allowed: ['...', 'N']")
        return shape

    def symbols(self) -> Shape | None:
        return None if self.shape is None else tuple(self.shape)


class Attribute(BaseModel):
    """A number or a flag that is not a tensor."""

    model_config = _Strict

    name: str
    param_type: Literal["required", "optional"] = "required"
    type: Literal[_Single, _List]
    default_value: Any = None

    _named = field_validator("name")(_identifier)

    @field_validator("type", mode="before")
    @classmethod
    def _spelled(cls, value: Any) -> Any:
        known = {"listint": "list_int", "listfloat": "list_float", "listbool": "list_bool", "str": "string"}
        known |= {"liststring": "list_string", "listlistint": "list_list_int"}
        return known.get(value.lower(), value.lower()) if isinstance(value, str) else value

    def default(self) -> float | int | bool | None:
        """The default as a number of the attribute's type; None where the caller must give one.

        Raises:
            ValueError: the default is of another type.
        """
        value = self.default_value
        if value is None or self.type not in ("int", "float", "bool"):
            return None
        if isinstance(value, str) and len(value) <= 64:  # msopgen's files write numbers both ways
            value = _number(value)
        fits = isinstance(value, bool) == (self.type == "bool") and isinstance(value, int | float)
        if not fits or abs(value) > 3e38 or (self.type == "int" and value != int(value)):
            raise ValueError(f"found {self.default_value!r}; allowed: a value of type {self.type}")
        return float(value) if self.type == "float" else int(value) if self.type == "int" else value


def _number(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text) if re.search(r"[.eE]", text) else int(text)
    except ValueError:
        return text


class ToleranceModel(BaseModel):
    """How far results may be from float64: a factor of eager's own error, and units in the last place."""

    model_config = _Strict

    factor: StrictFloat | StrictInt = Field(default=2.0, ge=0, le=100)
    ulps: StrictFloat | StrictInt = Field(default=1.0, ge=0, le=100)


class Prototype(BaseModel):
    """One operator, as its JSON describes it."""

    model_config = _Strict

    op: str
    language: str | None = None
    input_desc: list[Description] = Field(min_length=1, max_length=_MOST)
    output_desc: list[Description] = Field(min_length=1, max_length=_MOST)
    attr: list[Attribute] = Field(default=[], max_length=_MOST)
    formula: dict[str, str] | str | None = None
    kind: str | None = None
    tolerance: ToleranceModel | None = None

    @field_validator("op")
    @classmethod
    def _upper_camel(cls, op: str) -> str:
        if not _CAMEL.fullmatch(op):
            raise ValueError("allowed: UpperCamel, at most 64 ASCII letters and digits, such as RopeCustom")
        name = snake_case(op)
        if name in RESERVED or name in NAMESPACES:
            raise ValueError(
                f"its functions would be named {name!r}, which means something else; allowed: another name"
            )
        return op

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str | None) -> str | None:
        if kind is not None and kind not in KINDS:
            raise ValueError(f"allowed: {', '.join(KINDS)}")
        return kind

    @property
    def name(self) -> str:
        """The operator's name in Python and C++: rope_custom for RopeCustom."""
        return snake_case(self.op)

    @property
    def tensors(self) -> list[Description]:
        return [*self.input_desc, *self.output_desc]

    def columns(self) -> list[tuple[str, ...]]:
        """The supported combinations of types, inputs then outputs; a list of one is repeated."""
        longest = max(len(t.type) for t in self.tensors)
        return [tuple(t.type[i % len(t.type)] for t in self.tensors) for i in range(longest)]


def snake_case(op: str) -> str:
    """rope_custom for RopeCustom, as msopgen names files, and for RoPECustom."""
    words = re.sub(r"RoPE|MoE|LoRA|ALiBi|YaRN|(?:Re|Si|Ge|SwiG|GeG|ReG)LU", lambda m: m[0].capitalize(), op)
    words = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", words)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", words).lower()


def read(path: Path, op: str | None = None) -> Prototype:
    """The prototype in a file, or the one named `op` where the file holds several.

    Raises:
        PrototypeError: naming the file, the line, the field, what was found and what is allowed.
        OSError: the file cannot be read.
    """
    if path.stat().st_size > _LARGEST:
        raise PrototypeError(f"{path}: {path.stat().st_size} bytes; a prototype has at most {_LARGEST}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PrototypeError(f"{path}: byte {error.start} is no UTF-8; save the file as UTF-8") from None
    return parse(text, str(path), op)


def parse(text: str, where: str = "prototype", op: str | None = None) -> Prototype:
    """The same for a text."""
    if len(text) > _LARGEST:
        raise PrototypeError(f"{where}: {len(text)} characters; a prototype has at most {_LARGEST}")
    data, lines = jsonc.parse(text, where)
    entries = data if isinstance(data, list) else [data]
    names = [d.get("op") if isinstance(d, dict) else None for d in entries]
    if len(entries) != 1 and op is None:
        shown = ", ".join(str(n)[:64] for n in names[:20])
        raise PrototypeError(
            f"{where}: holds {len(entries)} operators; choose one with --op: {shown or 'none'}"
        )
    index = 0 if op is None else names.index(op) if op in names else -1
    if index < 0 or names.count(op) > 1:
        count = "no" if index < 0 else "more than one"
        raise PrototypeError(
            f"{where}: {count} operator named {str(op)[:64]!r}; there are: {', '.join(map(str, names[:20]))}"
        )
    at: jsonc.Path = (index,) if isinstance(data, list) else ()
    data = entries[index]
    try:
        prototype = Prototype.model_validate(data)
    except ValidationError as error:
        raise PrototypeError(_explain(error, where, lines, at)) from None
    for path, problem in _whole(prototype):
        raise PrototypeError(f"{where}: line {_line(lines, (*at, *path))}: {jsonc.shown(path)}: {problem}")
    return prototype


def _whole(p: Prototype) -> Iterator[tuple[jsonc.Path, str]]:
    """What is wrong between the parts."""
    seen: dict[str, str] = {p.name: "the operator"}
    for key in ("input_desc", "output_desc", "attr"):
        for i, item in enumerate(getattr(p, key)):
            at: jsonc.Path = (key, i, "name")
            if item.name in seen:
                yield at, f"{item.name!r} is taken by {seen[item.name]}; allowed: a name of its own"
            if f"d{item.name}" in seen or (item.name[0] == "d" and item.name[1:] in seen):
                yield at, f"{item.name!r} would be mistaken for a gradient; allowed: another name"
            seen[item.name] = f"{key}[{i}]"
    longest = max(len(t.type) for t in p.tensors)
    for key, tensors in (("input_desc", p.input_desc), ("output_desc", p.output_desc)):
        for i, t in enumerate(tensors):
            for field in ("type", "format"):
                count = len(getattr(t, field))
                if count not in (1, longest):
                    allowed = f"{longest}, one for each combination, or one"
                    yield (key, i, field), f"found {count} entries; allowed: {allowed}"
    for i, a in enumerate(p.attr):
        try:
            a.default()
        except ValueError as wrong:
            yield ("attr", i, "default_value"), str(wrong)
    for i, t in enumerate(p.input_desc):
        if not t.shape and any(one.shape is not None for one in p.input_desc):
            found = f"shape of {t.name} is {'missing' if t.shape is None else 'without an axis'}"
            yield ("input_desc", i), f"{found}; allowed: a shape for every input, such as [1], or for none"


def _explain(error: ValidationError, where: str, lines: dict[jsonc.Path, int], at: jsonc.Path) -> str:
    """The first thing that is wrong, in one message."""
    # A field that nobody knows may be the one that is missing, spelled wrong.
    first = min(
        error.errors(include_url=False, include_context=False), key=lambda e: e["type"] != "extra_forbidden"
    )
    path = tuple(first["loc"])
    while path and (*at, *path) not in lines and first["type"] != "missing":
        path = path[:-1]  # pydantic adds which member of a union it tried
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "is required, and missing"
    elif first["type"] == "extra_forbidden":
        parts: dict[Any, type[BaseModel]] = {"attr": Attribute, "tolerance": ToleranceModel}
        model = parts.get(path[0], Description) if len(path) > 1 else Prototype
        message = f"is no field of a prototype; allowed: {', '.join(model.model_fields)}"
    else:
        known = _ALLOWED.get(first["type"])
        message = f"found {repr(first['input'])[:80]}; {f'allowed: {known}' if known else message}"
    if len(message) > 500:  # it repeats what was found, however long that is
        message = f"{message[:250]} ... {message[-250:]}"
    return f"{where}: line {_line(lines, (*at, *path))}: {jsonc.shown(path) or 'the top level'}: {message}"


def _line(lines: dict[jsonc.Path, int], path: jsonc.Path) -> int:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)
