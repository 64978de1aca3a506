"""One benchmark of a decoder: the exact model first, then contestants, each checked and then timed in turns."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from opsmith import measure
from opsmith.cli import CommandError, models
from opsmith.cli.common import size_of
from opsmith.cli.llm import AGAINST, DTYPES, FORMATS, contestant, generator, source

_CHECKED = 8  # tokens whose logits are held to the exact ones


@dataclass(frozen=True)
class Said:
    """What a contestant said of a text: the tokens the text went on with, its logits `[batch, tokens, vocabulary]`, and
    the tokens that it would have taken; of the exact model, what rounding its layers' inputs takes of the logits."""

    forced: list[list[int]]
    logits: Tensor
    chosen: list[list[int]]
    rows: float = 0.0


class Bench:
    """One benchmark: the exact model first, then the contestants, cell by cell."""

    def __init__(
        self, console: Console, model: source.Source, workspace: Path, dtype: str, new: int, rounds: int
    ) -> None:
        self.console, self.model, self.workspace = console, model, workspace
        self.dtype, self.new, self.rounds = dtype, new, rounds
        self.longest = 0
        self.about: dict[str, str] = {}

    def run(
        self, cells: list[tuple[int, int]], others: list[str], formats: list[str], python: str | None
    ) -> list[dict[str, Any]]:
        """The cells' results: (batch, prompt) each."""
        self.longest = self.new + max(length for _, length in cells)
        ids = {cell: source.prompts(self.model, *cell).tolist() for cell in cells}
        known: dict[tuple[int, int], dict[str, Said]] = {cell: {} for cell in cells}
        rounding = [name for name in (*others, *formats) if name not in ("hf", "compile", "gguf", *DTYPES)]
        computing = dict.fromkeys([self.dtype, *(name for name in formats if name in DTYPES)])
        right = ["exact", *(f"exact {name}" for name in rounding), *(f"hf {dtype}" for dtype in computing)]
        for name in right:
            with self._started(name, self.dtype, None) as one:
                for cell, said in known.items():
                    with self.console.status(f"what others are held to: {name}, {title(*cell)}"):
                        forced = said["exact"].forced if said else None
                        said[name] = self._check(one, ids[cell], forced)
        results = []
        with contextlib.ExitStack() as stack:
            contestants: dict[str, contestant.Contestant] = {}
            for name in [*others, *formats]:
                with self.console.status(f"starting {name}"):
                    contestants[name] = stack.enter_context(self._started(name, self.dtype, python))
                    self.about |= {name: contestants[name].hello["about"]} if name == "llamacpp" else {}
            for cell in cells:
                # llama.cpp's Python binding evaluates one sequence at a time.
                able = {n: c for n, c in contestants.items() if n != "llamacpp" or cell[0] == 1}
                results.append(self._cell(cell, ids[cell], able, known[cell]))
        return results

    def _check(
        self, one: contestant.Contestant, ids: list[list[int]], forced: list[list[int]] | None
    ) -> Said:
        """The tokens that a contestant would take, and its logits, while the text goes on with the tokens given."""
        file, new = self.workspace / "logits.npy", min(self.new, _CHECKED)
        answer = one.ask(ids=ids, new=new, forced=forced, logits=str(file))
        logits = torch.from_numpy(np.load(file))
        said = answer["tokens"] if forced is None else forced
        return Said(said, logits, logits.argmax(-1).tolist(), answer.get("rows", 0.0))

    def _cell(
        self,
        cell: tuple[int, int],
        ids: list[list[int]],
        contestants: dict[str, contestant.Contestant],
        known: dict[str, Said],
    ) -> dict[str, Any]:
        """One batch and length: everyone checked, then timed in turns.

        What is `allowed` follows from eager's error in the same dtype. Who rounds weights is held to the exact model
        with these weights; who rounds the inputs of layers, too, may be off by twice what that takes of the logits.
        """
        batch, length = cell
        rows: dict[str, dict[str, Any]] = {}
        own, right = {}, {}
        for name, one in contestants.items():
            start = time.perf_counter()
            with self.console.status(f"checking {name}, {title(*cell)}"):
                own[name] = self._check(one, ids, known["exact"].forced)
                one.ask(ids=ids, new=self.new)  # where a longer cache needs other code, that is made now
            dtype = name if name in DTYPES else self.dtype
            eager = models.error_of(known[f"hf {dtype}"].logits, known["exact"].logits.double())
            exact = known.get(f"exact {name}", known["exact"])  # with its own weights
            right[name] = exact.logits
            error = models.error_of(own[name].logits, exact.logits.double()).rms
            allowed = models.allowed(eager, getattr(torch, dtype)) + 2 * exact.rows
            if not error <= allowed:
                detail = f"relative error of the logits {error:.2e}, allowed {allowed:.2e}"
                raise measure.WrongResult(name, "wrong value", detail, error, allowed)
            rows[name] = {"error": models.error_of(own[name].logits, known["exact"].logits.double()).rms}
            rows[name] |= {"error_of_arithmetic": error, "prepare_seconds": time.perf_counter() - start}
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
        reads = []
        names = list(contestants)
        for turn in range(self.rounds):
            with self.console.status(f"timing {title(*cell)}, round {turn + 1} of {self.rounds}"):
                reads.append(measure.measure_roofs(kinds=("read",)).bandwidth("read"))
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    answer = contestants[name].ask(ids=ids, new=self.new)
                    _same(name, answer["tokens"], own[name], right[name])
                    answers[name].append(answer)
        read = statistics.median(reads)
        for name, runs in answers.items():
            hello = contestants[name].hello
            middle = length + self.new // 2
            cache = generator.cache_bytes(self.model.config, batch, middle, hello["cache_element"])
            bytes_read = ({**hello, **runs[-1]})["weight_bytes"] + cache
            firsts, tokens = [run["first"] for run in runs], [statistics.median(run["steps"]) for run in runs]
            token = statistics.median(tokens)
            rows[name] |= {
                "first_seconds": statistics.median(firsts),
                "token_seconds": token,
                "tokens_per_second": batch / token,
                "spread": measure.spread(tokens),
                "bytes_read": bytes_read,
                "of_read_roof": bytes_read / token / read,
                "peak_bytes": max(run["peak_bytes"] for run in runs),
                "samples": {"first": firsts, "token": tokens},
            }
        for name, row in rows.items():
            row["ratios"] = {
                base: {
                    what: measure.paired_ratio(name, base, row["samples"][what], rows[base]["samples"][what])
                    for what in ("first", "token")
                }
                for base in rows
                if base in AGAINST and base != name
            }
        return {"batch": batch, "prompt": length, "read_bandwidth": read, "reads": reads, "contestants": rows}

    def _wider(self) -> str:
        """The dtype of the exact model, which has to have room."""
        wider = "float64" if self.dtype == "float32" else "float32"
        files = sum(file.stat().st_size for file in self.model.folder.glob("*.safetensors"))
        size = files // self.model.dtype.itemsize * (8 if wider == "float64" else 4)
        memory = measure.describe().memory_bytes
        if memory and size > 0.6 * memory:
            raise CommandError(
                f"bench-llm: the model in {wider}, which all are held to, takes {size_of(size)} of the machine's "
                f"{size_of(memory)}; compute in bfloat16 (--dtype), or take a smaller model"
            )
        return wider

    @contextlib.contextmanager
    def _started(self, name: str, dtype: str, python: str | None) -> Iterator[contestant.Contestant]:
        """A contestant's process, ended afterwards."""
        spec: dict[str, Any] = {"threads": torch.get_num_threads()}
        if name == "llamacpp":
            assert python is not None
            # A file and no module: opsmith need not be installed there.
            command = [python, str(Path(contestant.__file__).with_name("llamacpp.py"))]
            spec |= {"gguf": str(self.model.gguf), "longest": self.longest}
        else:
            command = [sys.executable, "-m", contestant.__name__]
            kind, _, of = name.partition(" ")
            if kind not in ("exact", "hf", "compile"):
                kind, of = "opsmith", name
            dtype = of if of in DTYPES else dtype
            if of == "gguf":
                kind, of = kind if kind == "exact" else of, dtype
                spec |= {"gguf": str(self.model.gguf)}
            quantize = of if of in FORMATS and of not in DTYPES else None
            spec |= {"folder": str(self.model.folder), "kind": kind, "quantize": quantize, "dtype": dtype}
            spec |= {"wider": self._wider(), "rows": of == "llamacpp"} if kind == "exact" else {}
        one = contestant.Contestant(name, command, spec, self.workspace / f"{name}.log")
        try:
            yield one
        finally:
            one.close()


def _same(name: str, tokens: list[list[int]], said: Said, exact: Tensor) -> None:
    """A timed run has to say what the checked one did: as long as it took the same tokens, and one token further.

    Where two tokens are no further apart than the logits are exact, either may be taken, and the texts part.
    """
    each = zip(tokens, said.forced, said.chosen, said.logits, exact, strict=True)
    for row, forced, chosen, logits, right in each:
        for i, (got, want) in enumerate(zip(row, chosen, strict=False)):
            if got != want:
                apart = float(logits[i, want] - logits[i, got])
                decided = 2 * float((logits[i].double() - right[i].double()).abs().max())
                if apart > decided:
                    detail = f"timed, it generated {row[: i + 1]}, checked, {chosen[: i + 1]}"
                    raise measure.WrongResult(name, "wrong value", detail, apart, decided)
            if got != want or want != forced[i]:
                break


def title(batch: int, length: int) -> str:
    return f"batch {batch}, prompt {length}"
