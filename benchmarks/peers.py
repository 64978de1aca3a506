"""Encoders beside other ways to run them: each held to the model in float64, then timed in turns, shape by shape.

    make peers                                  # in an environment of its own, which it makes: half an hour
    make peers ARGS="--quick --against compile,openvino"
    make peers ARGS="--json FILE --svg docs/assets/peers.svg"

Two models: MiniLM, and a BERT of base size with seeded random weights. Decoders are `opsmith bench-llm --against`.

Each contestant is a process of its own, which counts the seconds of its calls itself: several OpenMP and TBB runtimes
in one process take each other's cores, importing zentorch changes PyTorch for all, and what one compiles another would
find. All have the same number of threads, and only one of them works at a time. `measure.compare` makes the rounds, on
a clock that adds up what the processes counted, so that a question's way to them takes no time.

Each is prepared for these shapes: torch.compile with frozen weights and code of its own for each shape, zentorch
likewise, OpenVINO reshaped to each, opsmith with examples of all. ONNX Runtime takes one file for any size, as
PyTorch's exporter writes it, with all optimizations of a session; its own optimizer for transformers takes no part.
OpenVINO is told which dtype to compute in, also where it would take float32 by itself.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import itertools
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

import opsmith
from opsmith import measure
from opsmith.checkpoints.folder import one_line
from opsmith.cli import CommandError, hf, minilm, models, pictures
from opsmith.cli.common import Output, time_of
from opsmith.cli.llm.contestant import Contestant
from opsmith.cli.models import EAGER, OPSMITH, Batch, Call

SHAPES = ((1, 16), (1, 128), (8, 128), (32, 64))  # batch and length
DTYPES = ("float32", "bfloat16")
BATCHES = 3  # of each shape, in turn
ENDLESS = 10.0  # seconds of a call that is not timed
SAMPLE = 0.1  # seconds that a sample lasts about, of many calls where they are short


def _bert(**sizes: int) -> nn.Module:
    from transformers import BertConfig, BertModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertModel(BertConfig(**sizes)).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "minilm": lambda: minilm.load().model,
    "bert-base": _bert,
    "tiny": lambda: _bert(
        vocab_size=999, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=128
    ),
}


def load(name: str) -> nn.Module:
    """One of `MODELS`, without the layer behind the last hidden states, which nobody reads."""
    model = MODELS[name]()
    model.pooler = None  # type: ignore[assignment]
    return model


class _Positional(nn.Module):
    """Hidden states of two tensors: what an exporter can name the inputs and the output of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return minilm.hidden(self.model, {"input_ids": input_ids, "attention_mask": attention_mask})


# How each is prepared: the model in float32, one batch of each shape, the dtype to compute in, a folder for files.
Prepare = Callable[[nn.Module, Sequence[Batch], torch.dtype, Path], Call]


def _eager(model: nn.Module, batches: Sequence[Batch], dtype: torch.dtype, folder: Path) -> Call:
    return functools.partial(minilm.hidden, model.to(dtype))


def _opsmith(model: nn.Module, batches: Sequence[Batch], dtype: torch.dtype, folder: Path) -> Call:
    opsmith.optimize(model, [dict(batch) for batch in batches], dtype=dtype)
    return functools.partial(minilm.hidden, model)


def _compile(model: nn.Module, batches: Sequence[Batch], dtype: torch.dtype, folder: Path) -> Call:
    compiled: Any = torch.compile(model.to(dtype), dynamic=False)
    return functools.partial(minilm.hidden, compiled)


def _zentorch(model: nn.Module, batches: Sequence[Batch], dtype: torch.dtype, folder: Path) -> Call:
    import zentorch

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(zentorch.__name__).addHandler(handler)
    compiled: Any = torch.compile(model.to(dtype), backend="zentorch", dynamic=False)
    minilm.hidden(compiled, batches[0])
    # Where it does not like a processor it hands the graph to Inductor as it is, and only warns.
    if refused := next((line for line in said if "only available on" in line), None):
        raise RuntimeError(refused)
    return functools.partial(minilm.hidden, compiled)


def _onnxruntime(model: nn.Module, batches: Sequence[Batch], dtype: torch.dtype, folder: Path) -> Call:
    import onnxruntime

    file = folder / "model.onnx"
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    example = dict(batches_of(model, 2, 16)[0])  # not of batch 1, to which an export would hold
    torch.onnx.export(
        _Positional(model.to(dtype)).eval(),
        kwargs=example,
        f=file,
        dynamo=True,
        dynamic_shapes=dict.fromkeys(example, sizes),
        verbose=False,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda batch: torch.from_numpy(session.run(None, {n: batch[n].numpy() for n in names})[0])


def _openvino(model: nn.Module, batches: Sequence[Batch], dtype: torch.dtype, folder: Path) -> Call:
    import openvino

    core, kind = openvino.Core(), {torch.float32: openvino.Type.f32, torch.bfloat16: openvino.Type.bf16}
    converted = openvino.convert_model(_Positional(model).eval(), example_input=dict(batches[-1]))
    told = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": kind[dtype],
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = {}
    for batch in batches:
        shape = tuple(batch["input_ids"].shape)
        converted.reshape({name: list(shape) for name in batch})
        compiled[shape] = core.compile_model(converted, "CPU", told)

    def call(batch: Batch) -> torch.Tensor:
        given = {name: t.numpy() for name, t in batch.items()}
        return torch.from_numpy(compiled[tuple(batch["input_ids"].shape)](given)[0])

    return call


PREPARE: dict[str, Prepare] = {
    EAGER: _eager,
    OPSMITH: _opsmith,
    "compile": _compile,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "zentorch": _zentorch,
}
# Read when PyTorch is imported. From a cache zentorch would not be asked whether it likes this processor.
ENVIRONMENT = {
    "compile": ["TORCHINDUCTOR_FREEZING=1"],
    "zentorch": ["TORCHINDUCTOR_FREEZING=1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"],
}
PEERS = [name for name in PREPARE if name not in (EAGER, OPSMITH)]


def batches_of(model: nn.Module, batch: int, length: int) -> list[Batch]:
    """Random tokens without padding, the same in every process."""
    return [hf.tokens(model.config, batch, length, seed) for seed in range(BATCHES)]


def work(spec: dict[str, Any]) -> None:
    """A contestant's process: prepares, then answers requests on stdin by lines of JSON, results by files."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    torch.set_num_threads(spec["threads"])
    shapes = [tuple(shape) for shape in spec["shapes"]]
    with torch.no_grad():
        try:
            start = time.perf_counter()
            model = load(spec["model"])
            batches = {shape: batches_of(model, *shape) for shape in shapes}
            firsts = [several[0] for several in batches.values()]
            prepare = PREPARE[spec["name"]]
            call = prepare(model, firsts, getattr(torch, spec["dtype"]), Path(spec["folder"]))
        except ModuleNotFoundError as error:
            answer({"error": f"{error.name} is not installed; `make peers` does it"})
            return
        except Exception as error:  # whatever it is, the parent says it
            answer({"error": f"{type(error).__name__}: {one_line(error)}"})
            return
        answer({"prepare_seconds": time.perf_counter() - start})
        turns = {shape: itertools.cycle(several) for shape, several in batches.items()}
        for line in sys.stdin:
            request = json.loads(line)
            shape = tuple(request["shape"])
            try:
                if "result" in request:
                    np.save(request["result"], call(batches[shape][0]).float().numpy())
                # Of short ones the first is not timed: another process had the caches, and its threads may still spin.
                if request["calls"] > 1:
                    call(batches[shape][0])
                calls = [functools.partial(call, next(turns[shape])) for _ in range(request["calls"])]
                with measure.no_collection():
                    answer({"seconds": measure.by_clock(calls)})
            except Exception as error:  # whatever it is, the parent says it
                answer({"error": f"{type(error).__name__}: {one_line(error)}"})


class _Clock:
    """Seconds that the contestants counted, one after the other."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def timed(self, one: Contestant, shape: tuple[int, int], calls: int) -> Callable[[], object]:
        def run() -> None:
            self.now += one.ask(shape=shape, calls=calls)["seconds"]

        return measure.Repeated(run, calls)


class Bench:
    """All shapes of one model in one dtype, each contestant in its process."""

    def __init__(self, output: Output, model: str, dtype: str, names: Sequence[str], folder: Path) -> None:
        self.console, self.model, self.dtype, self.names = output.console, model, dtype, names
        self.folder = folder
        self.exact = load(model).double()
        self.rounded = load(model).to(getattr(torch, dtype))
        self.refused: dict[str, str] = {}
        self.endless: dict[str, str] = {}

    def run(self, shapes: Sequence[tuple[int, int]], rounds: int, budget: float) -> Iterator[dict[str, Any]]:
        """One result for each shape, the smallest first."""
        shapes = sorted(shapes, key=math.prod)
        with ExitStack() as stack:
            running = {}
            for name in self.names:
                spec = {"name": name, "model": self.model, "dtype": self.dtype, "shapes": shapes}
                spec |= {"threads": torch.get_num_threads(), "folder": str(self.folder)}
                command = ["env", *ENVIRONMENT.get(name, []), sys.executable, __file__, "--work"]
                with self.console.status(f"{self.model}, {self.dtype}: preparing {name}"):
                    try:
                        running[name] = Contestant(name, command, spec, self.folder / f"{name}.log")
                        stack.callback(running[name].close)
                    except CommandError as error:
                        self.refused[name] = str(error).removeprefix(f"{name}: ")
            for shape in shapes:
                yield self._shape(shape, running, rounds, budget)

    def _shape(
        self, shape: tuple[int, int], running: Mapping[str, Contestant], rounds: int, budget: float
    ) -> dict[str, Any]:
        batch = batches_of(self.exact, *shape)[0]
        with torch.no_grad():
            exact = minilm.hidden(self.exact, batch)
            with measure.Widened():
                eager = models.error_of(minilm.hidden(self.rounded, batch), exact)
        allowed = models.allowed(eager, getattr(torch, self.dtype))
        clock, errors, timed, left_out, first = _Clock(), {}, {}, {**self.refused}, {}
        for name, one in running.items():
            if why := self.endless.get(name):
                left_out[name] = why
                continue
            with self.console.status(f"{self.model}, {self.dtype}, {title(shape)}: checking {name}"):
                try:
                    file, start = self.folder / "result.npy", time.perf_counter()
                    seconds = one.ask(shape=shape, calls=1, result=str(file))["seconds"]
                    first[name] = time.perf_counter() - start - seconds
                except CommandError as error:
                    left_out[name] = str(error).removeprefix(f"{name}: ")
                    continue
            errors[name] = models.error_of(torch.from_numpy(np.load(file)), exact).rms
            if not errors[name] <= allowed:
                left_out[name] = f"wrong: relative error {errors[name]:.1e}, allowed {allowed:.1e}"
            elif seconds > ENDLESS:
                left_out[name] = self.endless[name] = (
                    f"not timed: a call takes {seconds:.0f} s at {title(shape)}"
                )
            else:
                timed[name] = clock.timed(one, shape, max(1, math.ceil(SAMPLE / seconds)))
        result = {"model": self.model, "dtype": self.dtype, "shape": list(shape), "allowed": allowed}
        result |= {"errors": errors, "left_out": left_out, "first_seconds": first}
        result["prepare_seconds"] = {name: one.hello["prepare_seconds"] for name, one in running.items()}
        if not timed:
            return result
        try:
            with self.console.status(f"{self.model}, {self.dtype}, {title(shape)}: timing"):
                found = measure.compare(
                    timed,
                    rounds=rounds,
                    budget_s=budget,
                    min_time=0.0,
                    warmup=0,  # each has just run, to be checked
                    clock=clock,
                    notes={
                        "inputs": f"{BATCHES} batches of random tokens in turn",
                        "outputs": "freshly allocated",
                    },
                )
        except CommandError as error:  # one of them ended: the other shapes go on without it
            left_out |= dict.fromkeys(timed, f"not timed at {title(shape)}: {error}")
            return result
        ratios = {
            name: found.ratio(OPSMITH, name).to_json()
            for name in found.names
            if OPSMITH in timed and name != OPSMITH
        }
        kept = {key: value for key, value in found.to_json().items() if key not in ("machine", "checked")}
        return result | {"comparison": kept, "ratios": ratios}


def title(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def wins(cells: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Who is faster than opsmith, and where: the peer's name and the cell."""
    return [
        (name, cell)
        for cell in cells
        for name, ratio in cell.get("ratios", {}).items()
        if ratio["verdict"] == "slower"
    ]


def versions() -> dict[str, str]:
    """Of everything that takes part, where it is installed."""
    found = {}
    for name in ("torch", "transformers", "onnxruntime", "onnxscript", "openvino", "zentorch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def draw(data: dict[str, Any], file: Path) -> None:
    """Bars of each contestant's time over opsmith's, with the intervals of the ratios."""
    cells = [cell for cell in data["cells"] if cell.get("ratios")]
    panels = list(dict.fromkeys((cell["model"], cell["dtype"]) for cell in cells))
    names = list(dict.fromkeys(name for cell in cells for name in cell["ratios"]))
    pyplot = pictures.pyplot()
    from matplotlib.ticker import LogLocator

    figure, axes = pyplot.subplots(
        max(len(panels), 1), figsize=(9, 2.6 * max(len(panels), 1)), layout="constrained", squeeze=False
    )
    for panel, (model, dtype) in zip(axes[:, 0], panels, strict=False):
        some = [cell for cell in cells if (cell["model"], cell["dtype"]) == (model, dtype)]
        for i, name in enumerate(names):
            ratios = {at: cell["ratios"][name] for at, cell in enumerate(some) if name in cell["ratios"]}
            if not ratios:
                continue
            over = [ratio["speedup"] for ratio in ratios.values()]
            reach = [
                [one["speedup"] - one["speedup_lo"] for one in ratios.values()],
                [one["speedup_hi"] - one["speedup"] for one in ratios.values()],
            ]
            width = 0.8 / len(names)
            places = [at + (i - (len(names) - 1) / 2) * width for at in ratios]
            # From opsmith's time on: what is faster hangs below it.
            panel.bar(
                places,
                [n - 1 for n in over],
                width,
                bottom=1,
                yerr=reach,
                capsize=2,
                color=f"C{i}",
                label=name,
            )
        panel.axhline(1, color="black", linewidth=1)
        panel.set(xticks=range(len(some)), xticklabels=[title(cell["shape"]) for cell in some])
        panel.set(
            xlabel="batch × length", ylabel="time, × opsmith's", title=f"{model}, {dtype}", yscale="log"
        )
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        panel.grid(axis="y", color="0.9")
        panel.set_axisbelow(True)
        panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    machine = data["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['threads']} threads, {data['taken'][:10]}", fontsize=9)
    pictures.save("--svg", figure, file)


def show(output: Output, cell: dict[str, Any]) -> None:
    output.console.print(f"\n{cell['model']}, {cell['dtype']}, {title(cell['shape'])}")
    timed = cell.get("comparison", {}).get("contestants", {})
    for name, one in sorted(timed.items(), key=lambda item: item[1]["median"]):
        ratio = cell["ratios"].get(name)
        over = f"opsmith {ratio['speedup']:.2f} × as fast, {ratio['verdict']}" if ratio else ""
        error = f"error {cell['errors'][name]:.1e}"
        output.console.print(f"  {name:12} {time_of(one['median']):>8}  {error}  {over}")
    for name, why in cell["left_out"].items():
        output.console.print(f"  {name:12} {why}")


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"{', '.join(MODELS)}; may be repeated.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"{', '.join(DTYPES)}; may be repeated.")] = None,
    against: Annotated[str, typer.Option(metavar="NAMES", help="Beside eager, with commas.")] = ",".join(
        PEERS
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each contestant, at most.")] = 20,
    budget: Annotated[
        float, typer.Option(help="Seconds after which a shape's rounds end; five at least.")
    ] = 30.0,
    quick: Annotated[bool, typer.Option("--quick", help="MiniLM alone, two shapes, five rounds.")] = False,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the JSON there.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the bars there.")] = None,
) -> None:
    """Encoders in eager, opsmith and other engines: right first, then in turns."""
    chosen = model or (["minilm"] if quick else ["minilm", "bert-base"])
    dtypes, others = dtype or list(DTYPES), [name for name in against.split(",") if name]
    for option, given, known in (
        ("model", chosen, MODELS),
        ("dtype", dtypes, DTYPES),
        ("against", others, PEERS),
    ):
        if wrong := [name for name in given if name not in known]:
            raise typer.BadParameter(
                f"{wrong[0]!r} is not known; there are: {', '.join(known)}", param_hint=option
            )
    output = Output(json)
    if svg is not None:
        pictures.check_file("--svg", svg)
    shapes, rounds = (SHAPES[:2], min(rounds, 5)) if quick else (SHAPES, rounds)
    machine, load, cells = measure.describe().to_json(), [os.getloadavg()], []
    for name, kind in itertools.product(chosen, dtypes):
        with tempfile.TemporaryDirectory(prefix="opsmith-peers-") as folder:
            bench = Bench(output, name, kind, [EAGER, OPSMITH, *others], Path(folder))
            for cell in bench.run(shapes, rounds, budget):
                cells.append(cell)
                show(output, cell)
    load.append(os.getloadavg())
    data = {
        "taken": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": versions(),
        "load": {"before": load[0], "after": load[1]},
        "cells": cells,
    }
    for name, cell in wins(cells):
        output.console.print(
            f"faster than opsmith: {name}, {cell['model']}, {cell['dtype']}, {title(cell['shape'])}"
        )
    if svg is not None:
        draw(data, svg)
    output.finish(data)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(sys.argv[2]))
    else:
        typer.run(main)
