"""What the page on Ascend says of traffic is what the emulation counts, number by number."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opsmith.operator import Make, registry
from opsmith.ops.mla.cards import table
from opsmith_ascend import launches
from opsmith_ascend.launches import Launch
from opsmith_ascend.library import kv_form

PAGE = Path(__file__).parents[4] / "docs" / "ascend.md"
make = Make(torch.bfloat16)


def rows() -> tuple[Any, ...]:
    return torch.arange(4096) % 512, torch.ones(512, 512, dtype=torch.int8), torch.ones(512)


CALLS: dict[str, tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "`silu_mul`, 256 × 11008, two tensors": ("silu_mul", lambda: (make(256, 11008), make(256, 11008)), {}),
    "`softmax`, 256 × 4096": ("softmax", lambda: (make(256, 4096),), {}),
    "`rms_norm`, 256 × 4096": ("rms_norm", lambda: (make(256, 4096), make(4096)), {}),
    "`layer_norm`, 256 × 4096": ("layer_norm", lambda: (make(256, 4096), make(4096), make(4096)), {}),
    "`rms_norm_quant`, 256 × 7168, a scale for each row": (
        "rms_norm_quant",
        lambda: (make(256, 7168), make(7168)),
        {},
    ),
    "`quantized_embedding`, 4096 rows of 512": ("quantized_embedding", rows, {"dtype": torch.bfloat16}),
    "`mla_kv_epilogue`, 256 tokens of V3, tiles of 16": (
        "mla_kv_epilogue",
        lambda: (make(256, 576), make(512), *table(make, 256, 64), torch.arange(256)),
        {"mode": "tiled", "blocks": 2, "block_size": 128, "rope": 64},
    ),
    **{
        f"`mla_q_epilogue`, {tokens} token{'s' if tokens > 1 else ''} of V3": (
            "mla_q_epilogue",
            lambda tokens=tokens: (make(tokens, 128, 192), make(128, 128, 512), *table(make, tokens, 64)),
            {},
        )
        for tokens in (1, 8)
    },
}


def launch(name: str, *args: Any, **kwargs: Any) -> Launch:
    made: Launch = (kv_form if name == "mla_kv_epilogue" else getattr(launches, name))(*args, **kwargs)
    return made


def told() -> dict[str, list[str]]:
    """The cells of the page's table by its first column."""
    section = PAGE.read_text().partition("## Traffic, emulated\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (`.*) \|$", section, re.MULTILINE)
    return {cells[0]: cells[1:] for cells in (line.split(" | ") for line in lines)}


def test_every_row_is_counted() -> None:
    assert told().keys() == CALLS.keys()


@pytest.mark.parametrize("row", CALLS)
def test_a_row_is_what_is_counted(row: str) -> None:
    name, inputs, options = CALLS[row]
    args = inputs()
    done = launch(name, *args, **options).emulated(48)
    assert done is not None
    least = registry()[name].cost(*args, **options).min_bytes
    counted = [str(done.blocks), f"{done.traffic:,}", f"{done.traffic / least:.3f}", f"{done.local_peak:,}"]
    busy = {"memory": done.cycles["MTE2"] + done.cycles["MTE3"], "V": done.cycles["V"]}
    first, second = sorted(busy, key=busy.__getitem__, reverse=True)
    counted.append(f"{first} {busy[first]:,.0f}, {second} {busy[second]:,.0f}")
    assert told()[row] == counted


def test_the_example_prints_what_the_page_shows() -> None:
    tensors = [torch.randn(64, 2048, dtype=torch.float16) for _ in range(2)]
    assert f"```\n{launches.silu_mul(*tensors).emulated(cores=48)}\n```" in PAGE.read_text()
