"""Generates with llama.cpp, for `opsmith bench-llm --against llamacpp`; runs where llama-cpp-python is installed.

By itself: nothing of opsmith is imported, as this may be another environment. Requests come on stdin and answers go to
stdout, a line of JSON each, as in contestant.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer

import llama_cpp  # noqa: E402
import numpy as np  # noqa: E402


class Decoder:
    def __init__(self, gguf: str, threads: int, longest: int) -> None:
        self.llm = llama_cpp.Llama(
            gguf, n_ctx=longest, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def step(self, tokens: list[int]) -> Any:
        """The logits after these tokens, in llama.cpp's own memory."""
        self.llm.eval(tokens)
        return np.ctypeslib.as_array(
            llama_cpp.llama_get_logits_ith(self.llm.ctx, -1), shape=(self.llm.n_vocab(),)
        )

    def generate(
        self, ids: list[list[int]], new: int, forced: list[list[int]] | None = None, logits: str | None = None
    ) -> dict[str, Any]:
        self.llm.reset()
        kept, chosen, times = [], [], []
        start, given = time.perf_counter(), ids[0]
        for i in range(new):
            said = self.step(given)
            token = forced[0][i] if forced else int(said.argmax())
            times.append(time.perf_counter() - start)
            chosen.append(token)
            if logits:
                kept.append(said.copy())
            given = [token]
        if logits:
            np.save(logits, np.stack(kept)[None])
        return {"tokens": [chosen], "first": times[0], "steps": np.diff(times).tolist()}


def peak_bytes() -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) << 10


def main() -> None:
    spec = json.loads(sys.argv[1])
    decoder = Decoder(spec["gguf"], spec["threads"], spec["longest"])
    size = llama_cpp.llama_model_size(decoder.llm.model)
    hello = {"weight_bytes": size, "cache_element": 2, "about": f"llama-cpp-python {llama_cpp.__version__}"}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        try:
            reply = {**decoder.generate(**json.loads(line)), "peak_bytes": peak_bytes()}
        except Exception as error:  # whatever it is, the parent says it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
