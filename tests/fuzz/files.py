"""Every file that the package reads, damaged in every way: it is read as it says, or refused by name.

A refusal is a ValueError or a TypeError of one line that names the file. What a cache holds is never refused: a damaged
one counts as empty. Nothing is written anywhere, and no file keeps a reader for seconds.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from opsmith.authoring.new import create
from opsmith.checkpoints import header
from opsmith.checkpoints.folder import check as check_folder
from opsmith.compiler import Config, Plan
from opsmith.compiler.kept import TIMES_SCHEMA, TuningCache
from opsmith.compiler.plan import PlanStep, ShapePlan
from opsmith.kernels.cache import Store
from tests.authoring.prototypes import PROTOTYPES
from tests.fuzz.fuzzer import Fuzzer

BERT = b'{"model_type": "bert"}'
SECONDS = 5.0  # that a reader may take


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name, what is right, how it is written, and what reads it in that folder."""

    name: str
    rights: tuple[Any, ...]
    write: Callable[[Any], str]
    read: Callable[[Path], Any]
    errors: tuple[type[Exception], ...] = (ValueError, TypeError)
    content: Callable[[], bytes] = bytes  # what is right, of a file that is no text


def toml(data: Any) -> str:
    """The TOML of a dictionary of plain values."""

    def value(v: Any) -> str:
        if isinstance(v, dict):
            return "{" + ", ".join(f"{json.dumps(str(k))} = {value(w)}" for k, w in v.items()) + "}"
        if isinstance(v, list):
            return "[" + ", ".join(map(value, v)) + "]"
        if isinstance(v, float) and not math.isfinite(v):
            return str(v)
        return json.dumps("" if v is None else v)

    if not isinstance(data, dict):
        return value(data)
    return "\n".join(f"{json.dumps(str(k))} = {value(v)}" for k, v in data.items())


@cache
def plan() -> dict[str, Any]:
    """A saved plan of two sets of sizes."""
    step = PlanStep(
        "softmax_1", "softmax", "softmax(f32[2, 5])", "native", "faster", {"native": 1.5}, {"onednn": "no"}, 3
    )
    shape = ShapePlan("L=5", [step, replace(step, slot=None)], 4096, True, "proved", "x = 1", False)
    data: dict[str, Any] = json.loads(
        Plan([shape, replace(shape, training=True)], "here", {"torch": "2"}).to_json()
    )
    return data


@cache
def weights() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save_file({"w": torch.ones(2, 3), "b": torch.zeros(3)}, f"{folder}/model.safetensors")
        return Path(folder, "model.safetensors").read_bytes()


@cache
def blocks() -> bytes:
    """A GGUF file: values of each kind, and tensors of numbers and of blocks."""
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.gguf")
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_block_count(1)
        writer.add_rope_freq_base(10000.0)
        writer.add_token_list(["a", "b"])
        writer.add_array("llama.sizes", [1, 2, 3])
        writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
        rows = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("token_embd.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file.read_bytes()


def read_blocks(file: Path) -> None:
    found = header.read(file)
    assert len(found.plain) < 10_000 + 100 * len(found.tensors)
    for name, tensor in found.tensors.items():
        assert found.rows(name).numel() == tensor.nbytes <= file.stat().st_size


def read_plan(file: Path) -> None:
    found = Plan.load(file)
    assert isinstance(found.table(), str)
    assert json.loads(found.to_json())["schema"] == 1
    said = json.loads(file.read_text())
    assert len(found.shapes) == len(said.get("shapes", []))


def read_config(file: Path) -> None:
    found = Config.load(file)
    assert isinstance(found.inductor_seconds, float)


def read_times(file: Path) -> None:
    cache = TuningCache(file)
    for key, times in cache.items():
        assert isinstance(key, str)
        assert all(isinstance(t, float) and 0 < t < math.inf for t in times.values())


def read_prototype(file: Path) -> None:
    create(file, file.parent / "made")


def read_in_folder(name: str, other: str, content: bytes, file: Path) -> None:
    """As the file of that name in a model's folder, beside another one."""
    folder = file.parent / "model"
    folder.mkdir()
    file.rename(folder / name)
    (folder / other).write_bytes(content)
    try:
        check_folder(folder)
    finally:
        (folder / name).rename(file)
        (folder / other).unlink()
        folder.rmdir()


def read_manifest(file: Path) -> None:
    facts = Store(file.parent).manifest(file.with_suffix(""))
    assert facts is None or isinstance(facts, dict)


CONFIG = {
    "dtype": "bfloat16",
    "quantize": "int4",
    "quantize_group": 32,
    "quantize_formats": {"*v_proj": "int8"},
    "quantize_skip": ["*lm_head"],
    "mla_cache": "split",
    "mla_block": 64,
    "pin": {"attention": "native"},
    "forbid": {"linear": ["onednn"]},
    "inductor": False,
    "inductor_seconds": 2.5,
    "tune": False,
}


def kinds() -> list[Kind]:
    """Of all files."""
    scope = TuningCache(Path("none"))._scope
    times = {
        "schema": TIMES_SCHEMA,
        "scope": scope,
        "entries": {"softmax f32[2, 5]": {"native": 1e-6, "eager": 2e-6}},
    }
    return [
        Kind("prototypes", tuple(PROTOTYPES.values()), json.dumps, read_prototype),
        Kind("plans", (plan(),), json.dumps, read_plan),
        Kind("configs", (CONFIG,), toml, read_config),
        Kind("tuning caches", (times,), json.dumps, read_times, ()),
        Kind("manifests", ({"sha256": "0" * 64, "tier": "avx2"},), json.dumps, read_manifest, ()),
        Kind(
            "models",
            ({"model_type": "bert", "hidden_size": 8},),
            json.dumps,
            partial(read_in_folder, "config.json", "model.safetensors", weights()),
            (header.CheckpointError,),
        ),
        Kind(
            "weights",
            (),
            lambda data: "",
            partial(read_in_folder, "model.safetensors", "config.json", BERT),
            (header.CheckpointError,),
            weights,
        ),
        Kind("blocks", (), lambda data: "", read_blocks, (header.CheckpointError,), blocks),
    ]


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf),
    *(
        "",
        "x",
        "x" * 70_000,
        "\0",
        "\ud800",
        "../../etc/passwd",
        "/tmp/elsewhere",
        "line\nline",
        "é",
        "nan",
        "1e999",
    ),
    *([], {}, [[]], [None], {"": 0}, [1, "a", {}], {"op": {"op": []}}),
)
TEXTS = (
    "NaN",
    "Infinity",
    "-",
    "1" * 5000,
    "1e999",
    "[" * 50_000,
    '{"a":' * 50_000,
    "\\ud800",
    "//",
    "/*",
    "\ufeff",
    "\0",
)


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values."""
    yield at
    for key, value in (
        data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    ):
        yield from places(value, (*at, key))


@dataclass(frozen=True)
class File:
    """A file's bytes, and how they came about."""

    content: bytes
    story: tuple[str, ...]

    def __repr__(self) -> str:
        return f"{' and '.join(self.story)}: {self.content[:300]!r}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def changed(draw: st.DrawFn, data: Any) -> tuple[Any, str]:
    """The data with one value of it another, gone, twice or deep inside others."""
    at = draw(st.sampled_from(list(places(data))))
    how = draw(st.sampled_from(("value", "value", "drop", "add", "rename", "deep", "text", "swap")))
    if not at:
        return (draw(st.sampled_from(ODD)), "all replaced") if how == "value" else (data, "as it was")
    data = copy.deepcopy(data)
    parent = reduce(lambda d, k: d[k], at[:-1], data)
    key, value = at[-1], parent[at[-1]]
    if how == "value":
        parent[key] = draw(st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=40))
    elif how == "drop":
        del parent[key]
    elif how == "add" and isinstance(value, dict):
        value[draw(st.text(max_size=8))] = draw(st.sampled_from(ODD))
    elif how == "add" and isinstance(value, list):
        value.extend(copy.deepcopy(value) * draw(st.sampled_from((1, 100))))
    elif how == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from((f"{key}x", f" {key}", str(key).upper(), "")))] = parent.pop(key)
    elif how == "deep":
        for _ in range(draw(st.sampled_from((1, 40, 400)))):
            value = [value]
        parent[key] = value
    elif how == "text":
        parent[key] = str(value)
    elif how == "swap":
        other = draw(st.sampled_from(list(places(data))))
        parent[key] = copy.deepcopy(reduce(lambda d, k: d[k], other, data))
    return data, f"{how} at {'.'.join(map(str, at))}"


@st.composite
def files(draw: st.DrawFn, kind: Kind) -> File:
    """A right file with up to three changes of its data, then up to two of its bytes."""
    story: list[str] = []
    if kind.rights:
        data = draw(st.sampled_from(kind.rights))
        for _ in range(draw(st.integers(0, 3))):
            data, what = changed(draw, data)
            story.append(what)
        try:
            content = kind.write(data).encode("utf-8", "surrogatepass")
        except RecursionError:  # the writer's own
            hypothesis.reject()
    else:
        content = kind.content()
    for _ in range(draw(st.integers(0 if story else 1, 2))):
        at = draw(st.integers(0, len(content)))
        how = draw(st.sampled_from(("cut", "insert", "flip", "double", "text", "word")))
        story.append(f"{how} {at}")
        if how == "cut":
            content = content[:at]
        elif how == "insert":
            content = content[:at] + draw(st.binary(max_size=9)) + content[at:]
        elif how == "flip" and content:
            where = at % len(content)
            content = (
                content[:where] + bytes([content[where] ^ draw(st.integers(1, 255))]) + content[where + 1 :]
            )
        elif how == "double":
            begin = draw(st.integers(0, at))
            content = content[:at] + content[begin:at] + content[at:]
        elif how == "word":
            word = draw(
                st.sampled_from((0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)) | st.integers(0, 4096)
            )
            content = content[:at] + word.to_bytes(8, "little") + content[at + 8 :]
        else:
            text = draw(st.sampled_from(TEXTS)).encode("utf-8")
            end = draw(st.integers(at, min(len(content), at + 12)))
            content = content[:at] + text + content[end:]
    return File(content, tuple(story) or ("as it was",))


def judge(kind: Kind, case: File) -> None:
    """Read the file in a folder of its own, in which nothing else may be afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "in" / "file.json"
        file.parent.mkdir()
        file.write_bytes(case.content)
        started = time.monotonic()
        refused = False
        try:
            kind.read(file)
        except kind.errors as error:
            refused = True
            said = str(error)
            assert said.strip(), "a refusal that says nothing"
            assert len(said) < 2000, f"a refusal of {len(said)} characters"
        assert time.monotonic() - started < SECONDS, "took too long"
        assert [f.name for f in Path(folder).iterdir()] == ["in"], "written elsewhere"
        left = sorted(f.name for f in file.parent.iterdir())
        assert left == ["file.json"] or (not refused and left == ["file.json", "made"]), f"left {left}"
        assert file.read_bytes() == case.content, "the file has changed"


def fuzzers() -> list[Fuzzer]:
    """One for each kind of file."""
    return [Fuzzer(f"files.{k.name}", files(k), partial(judge, k)) for k in kinds()]
