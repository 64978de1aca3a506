"""vLLM's server with and without the plugin, in turns: what `vllm bench serve` measures for the same requests.

    .venv-vllm/bin/python benchmarks/vllm_serve.py MODEL --rounds 5 --concurrency 1 4 16 --json served.json
    .venv-vllm/bin/python benchmarks/vllm_serve.py llama-1.1b --ways off auto int8 --server --max-model-len 1024

A server for each way listens on this machine alone, and takes most of its memory unless VLLM_CPU_KVCACHE_SPACE says how
many GiB; one at a time gets requests, in random order within a round, of random tokens by the round's seed, so that a
ratio is one of neighbors in time. Times mean something on a machine that does nothing else. Not named after the
package, which scripts beside it would import instead of vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opsmith import measure
from opsmith.cli.llm.source import LLAMA

# Not the command `vllm`: in vllm-cpu 0.32 it asks for the version of a package named vllm, which is not there.
SERVE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# By name: OPSMITH_VLLM, and what the server is told beside.
WAYS: dict[str, tuple[str, list[str]]] = {
    "off": ("off", []),
    "auto": ("auto", []),
    "all": ("all", []),
    "int8": ("auto", ["--quantization", "opsmith"]),
}
METRICS = ("output_throughput", *(f"p{p}_{kind}_ms" for kind in ("ttft", "itl") for p in (50, 99)))


def llama(folder: Path) -> None:
    """A model of 1.1 billion weights without these, which `--load-format dummy` makes; each token is a word."""
    import tokenizers
    import transformers

    config = transformers.LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(folder)


@contextlib.contextmanager
def server(model: str, way: str, more: list[str], log: Path) -> Iterator[str]:
    """A server that answers; its address."""
    plugin, told = WAYS[way]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*SERVE, "--model", model, "--host", "127.0.0.1", "--port", str(port), *told, *more]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env={**os.environ, "OPSMITH_VLLM": plugin}, stdout=file, stderr=file
        )
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"{address}/health").close()
                break
            if process.poll() is not None:
                raise RuntimeError(f"the server of {way!r} ended, its last words: {log.read_text()[-2000:]}")
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait()


def measured(model: str, address: str, concurrency: int, seed: int, options: argparse.Namespace) -> Any:
    """What the benchmark's client says of one round."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CLIENT, "--model", model, "--base-url", address, "--seed", str(seed)]
        command += ["--dataset-name", "random", "--random-input-len", str(options.input)]
        command += ["--random-output-len", str(options.output), "--ignore-eos", "--temperature", "0"]
        command += [
            "--num-prompts",
            str(options.prompts * concurrency),
            "--max-concurrency",
            str(concurrency),
        ]
        command += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99", "--disable-tqdm"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"the client failed: {ended.stderr[-2000:]}")
        result = json.loads(Path(folder, "result.json").read_text())
        if result["completed"] != options.prompts * concurrency:
            raise RuntimeError(
                f"{result['completed']} of {options.prompts * concurrency} requests were answered"
            )
        return {name: result[name] for name in METRICS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, a name that is in the Hub's cache, or llama-1.1b")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["off", "auto"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4, help="for each of the requests at once")
    parser.add_argument("--input", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--server", nargs=argparse.REMAINDER, default=[], help="last: what each server is told"
    )
    options = parser.parse_args()
    told: dict[str, Any] = {
        "machine": measure.describe().to_json(),
        "date": datetime.date.today().isoformat(),
    }
    told |= {"options": {k: v for k, v in vars(options).items() if k not in ("json", "model")}}
    found: dict[str, dict[str, list[Any]]] = {}
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        told["model"], more = Path(options.model).name, options.server
        if options.model == "llama-1.1b":
            options.model, more = str(work / "llama"), ["--load-format", "dummy", *more]
            llama(work / "llama")
        addresses = {}
        for way in options.ways:
            print(f"the server of {way} starts ...", file=sys.stderr)
            one = server(options.model, way, more, work / f"{way}.log")
            addresses[way] = stack.enter_context(one)
        for seed in range(-1, options.rounds):  # the first warms up
            for concurrency in options.concurrency:
                for way in random.Random(seed).sample(options.ways, len(options.ways)):
                    result = measured(options.model, addresses[way], concurrency, seed + 1, options)
                    if seed >= 0:
                        found.setdefault(str(concurrency), {}).setdefault(way, []).append(result)
                    rate = result["output_throughput"]
                    print(
                        f"round {seed + 1}, {concurrency} at once, {way}: {rate:.1f} tokens/s",
                        file=sys.stderr,
                    )
            if options.json and seed >= 0:
                options.json.write_text(json.dumps({**told, "rounds": found}, indent=1) + "\n")
    for at_once, ways in found.items():
        for way, rounds in ways.items():
            medians = {m: statistics.median(one[m] for one in rounds) for m in METRICS}
            print(f"{way}, {at_once} at once:", "  ".join(f"{m} {v:.1f}" for m, v in medians.items()))


if __name__ == "__main__":
    main()
