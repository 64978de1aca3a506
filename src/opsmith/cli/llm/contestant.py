"""A process that holds one model and generates on request, so that contestants share neither memory nor compiled code.

`python -m opsmith.cli.llm.contestant SPEC`: requests come on stdin and answers go to stdout, a line of JSON each;
logits go into files. `Contestant` is the other end.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from opsmith.cli import CommandError


class Contestant:
    """The parent's end: starts the process, which loads the model; every answer is a dictionary.

    Attributes:
        hello: what it said of itself: the bytes of weights that a token reads, and of an element of its cache.
    """

    def __init__(self, name: str, command: list[str], spec: dict[str, Any], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            self.hello = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Ask for a run, and wait for it.

        Raises:
            CommandError: it could not, or it is no longer there.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its log says why
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = [one for one in self._log.read_text(errors="replace").splitlines() if one.strip()]
            status = self._process.wait()
            raise CommandError(
                f"{self.name} ended with status {status}: {said[-1] if said else 'it said nothing'}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CommandError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()


Answer = Callable[[dict[str, Any]], None]


def answers() -> Answer:
    """How the process says a line; what libraries print from now on is no answer."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=lines, flush=True)

    return answer


def serve(model: Any, answer: Answer, rounding: Sequence[Any] = ()) -> None:
    """Answer every request; `rows` says what rounding the inputs of some layers takes of the logits."""
    import numpy as np
    import torch

    from opsmith.cli import models
    from opsmith.cli.llm import generator

    for line in sys.stdin:
        request = json.loads(line)
        try:
            forced, logits = request.get("forced"), request.get("logits")
            if not logits:
                generator.forget_peak()
            ask = functools.partial(
                generator.generate,
                model,
                torch.tensor(request["ids"]),
                request["new"],
                forced=None if forced is None else torch.tensor(forced),
                check=bool(logits),
            )
            found, rows = ask(), 0.0
            if found.logits is not None:
                np.save(logits, found.logits.numpy())
                with models.rounding_rows(rounding):
                    again = ask().logits if rounding else found.logits
                assert again is not None
                rows = models.error_of(again, found.logits.double()).rms
            said = {"tokens": found.tokens.tolist(), "first": found.first, "steps": found.steps, "rows": rows}
            memory = {"weight_bytes": generator.weight_bytes(model), "peak_bytes": generator.peak_bytes()}
            answer(said | memory)
        except Exception as error:  # whatever it is, the parent says it
            answer({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """The process's end."""
    answer, spec = answers(), json.loads(sys.argv[1])

    import torch

    import opsmith
    from opsmith.cli import hf
    from opsmith.compiler.modules.linear_layers import linear_layers
    from opsmith.compiler.modules.quantize import Packing

    torch.set_num_threads(spec["threads"])
    start = time.perf_counter()
    try:
        if spec["kind"] == "gguf":
            model = opsmith.load(spec["gguf"], dtype=spec["dtype"])
        else:
            model = hf.read(Path(spec["folder"])).to(getattr(torch, spec["dtype"]))
        rounding: list[torch.nn.Module] = []
        if spec["kind"] == "exact":
            packing, wider = Packing(), getattr(torch, spec["wider"])
            if spec["quantize"] is not None:
                packing.pack(model, opsmith.Config(quantize=spec["quantize"]))
            rounding = packing.unpack(model, wider)
            if spec["rows"]:
                rounding = [layer for _, layer in linear_layers(model)]
            model = model.to(wider)
        elif spec["kind"] == "compile":
            model.forward = torch.compile(model.forward)
        elif spec["kind"] == "opsmith":
            opsmith.optimize(model, quantize=spec["quantize"])
    except Exception as error:  # whatever it is, the parent says it
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    hello = {"about": f"torch {torch.__version__}", "seconds": time.perf_counter() - start}
    answer({"cache_element": getattr(torch, spec["dtype"]).itemsize, **hello})
    serve(model, answer, rounding)


if __name__ == "__main__":
    main()
