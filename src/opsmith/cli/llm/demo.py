"""The demo on Gemma 3 270M: what it writes before and after, how fast, and what each format loses."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import opsmith.ops  # the cards register themselves
from opsmith import measure
from opsmith.cli import hf
from opsmith.cli.common import size_of, time_of
from opsmith.cli.llm import gemma, generator, source
from opsmith.cli.phases import Phases
from opsmith.operator import Kind

FORMATS = ("float32", "bfloat16", "int8", "int8_dynamic", "int4")
SPEAKING = ("float32", "int8")  # those that generate: each takes as long as optimizing does
KINDS = set(Kind) - {Kind.LOSS, Kind.MLA}  # of operators that a decoder may be made of
_WINDOW, _WINDOWS = 256, 4  # tokens of the text whose perplexity is measured


class Demo(Phases):
    """One run: prints as it goes, and keeps everything for the JSON."""

    def __init__(self, console: Console, prompts: tuple[str, ...], new: int) -> None:
        super().__init__(console)
        self.prompts, self.new = prompts, new
        self.rows: dict[str, dict[str, Any]] = {}

    def run(self) -> dict[str, Any]:
        """Everything, in order; what is returned is the JSON."""
        self.folder = self.load("load the model; the first time, convert it", gemma.folder, KINDS)
        self.console.print(f"Gemma 3 270M, under Google's terms: {gemma.TERMS}, {gemma.terms()}\n")
        self._float32()
        for name in FORMATS[1:]:
            self._format(name)
        self._print()
        return self.data(model="gemma-3-270m", terms=gemma.TERMS, prompts=self.prompts, rows=self.rows)

    def _float32(self) -> None:
        """Before and after, with the text on a terminal as it comes, and token by token the same."""
        model, self.tokenizer = hf.load_with_tokenizer(self.folder)
        before = self._texts("eager", model, show=True)
        self._perplexity("eager", model)
        self._optimize("float32", model)
        after = self._texts("float32", model, show=True)
        self._perplexity("float32", model)
        for prompt, was, now in zip(self.prompts, before, after, strict=True):
            if was != now:
                self.faults.append(f"in float32 the text after {prompt!r} changed")
        said = self.faults[-1] if self.faults else f"{len(before)} × {self.new} tokens: the same as before"
        self.console.print(said, style="red" if self.faults else "green")
        opsmith.restore(model)

    def _format(self, name: str) -> None:
        """The perplexity of a format; and, of some, a text and its speed."""
        gc.collect()
        torch._dynamo.reset()
        model, _ = hf.load_with_tokenizer(self.folder)
        if name in SPEAKING:
            self._optimize(name, model)
            self._texts(name, model, show=False)
        else:
            with self.phase(f"pack {name}"):
                opsmith.optimize(model, **_options(name))
        self._perplexity(name, model)

    def _optimize(self, name: str, model: Any) -> None:
        """Optimize; what is captured, measured and proved at the first text is part of it."""
        with self.phase(f"optimize {name}"):
            opsmith.optimize(model, **_options(name))
            for ids in self._ids():
                generator.generate(model, ids, 4)

    def _ids(self) -> list[Tensor]:
        return [self.tokenizer(prompt, return_tensors="pt").input_ids for prompt in self.prompts]

    def _texts(self, name: str, model: Any, show: bool) -> list[list[int]]:
        """Generate after each prompt, timed, beside the read roof; the tokens of each."""
        from transformers import TextStreamer

        show = show and self.console.is_terminal and not self.console.quiet
        read = measure.measure_roofs(kinds=("read",)).bandwidth("read")
        if name == "eager":
            generator.generate(model, self._ids()[0], 4)  # its weights are read from disk, its code is loaded
        runs, length = [], 0
        generator.forget_peak()
        for prompt, ids in zip(self.prompts, self._ids(), strict=True):
            length = max(length, ids.shape[1])
            if show:
                self.console.print(f"{name}: ", end="", style="bold")
                self.console.print(prompt, end="", style="dim")
            text = TextStreamer(self.tokenizer, skip_prompt=True) if show else None
            runs.append(generator.generate(model, ids, self.new, text=text))
        weights = generator.weight_bytes(model)
        cache = generator.cache_bytes(model.config, 1, length + self.new // 2, model.dtype.itemsize)
        token = statistics.median([step for run in runs for step in run.steps])
        self.rows[name] = {
            "tokens_per_second": 1 / token,
            "first_seconds": statistics.median([run.first for run in runs]),
            "read_bandwidth": read,
            "of_read_roof": (weights + cache) / token / read,
            "weight_bytes": weights,
            "peak_bytes": generator.peak_bytes(),
            "texts": [self.tokenizer.decode(run.tokens[0]) for run in runs],
        }
        return [run.tokens[0].tolist() for run in runs]

    def _perplexity(self, name: str, model: Any) -> None:
        """Of a short text: how surprised the model is by each next token."""
        ids = self.tokenizer(source.text(), return_tensors="pt").input_ids[0, : _WINDOW * _WINDOWS]
        # What rounding loses does not depend on how the rest runs: without another capture, this takes seconds.
        with self.phase(f"perplexity of {name}"), torch.compiler.set_stance("force_eager"):
            found = opsmith.evaluate(model, ids, window=_WINDOW)
        row = self.rows.setdefault(name, {"weight_bytes": generator.weight_bytes(model)})
        row["perplexity"] = found.perplexity

    def _print(self) -> None:
        """All formats, one a row."""
        times = ("tokens/s", "× eager", "first token", "of the read roof")  # of those that generate
        table = Table("", "perplexity", *times, "weights", "memory", box=None, pad_edge=False)
        eager = self.rows["eager"]["tokens_per_second"]
        for name, row in self.rows.items():
            speed = row.get("tokens_per_second")
            timed = ("", "", "", "")
            if speed is not None:
                first, roof = time_of(row["first_seconds"]), f"{row['of_read_roof']:.0%}"
                timed = (f"{speed:.1f}", f"{speed / eager:.2f}", first, roof)
            table.add_row(
                name,
                f"{row['perplexity']:.2f}",
                *timed,
                size_of(row["weight_bytes"]),
                size_of(row["peak_bytes"]) if "peak_bytes" in row else "",
            )
        self.console.print(table)
        if any(row.get("of_read_roof", 0) > 1 for row in self.rows.values()):
            self.console.print(
                "Above 100 %: other work slowed the machine while its roof was measured.", style="yellow"
            )
        self.console.print("Other formats and sizes, in turns and beside others: opsmith bench-llm gemma\n")


def _options(name: str) -> dict[str, Any]:
    """What makes `optimize` use a format."""
    return {"dtype": name} if name in ("float32", "bfloat16") else {"quantize": name}
