"""The examples on the operators' pages run, on tensors of the shapes that they speak of."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opsmith
from opsmith import ops

FOLDER = Path(__file__).parents[2] / "docs" / "operators"
EXAMPLES = {
    page.stem: examples
    for page in sorted(FOLDER.glob("*.md"))
    if (examples := re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
}


def normed() -> dict[str, Any]:
    return {
        "x": torch.randn(4, 64),
        "weight": torch.randn(64),
        "bias": torch.randn(64),
        "r": torch.randn(4, 64),
    }


def experts() -> dict[str, Any]:
    model = SimpleNamespace(set_experts_implementation=lambda name: None)
    blocks = {
        "gate_up_blocks": [torch.zeros(512, 144, dtype=torch.uint8)] * 64,
        "down_blocks": [torch.zeros(256, 144, dtype=torch.uint8)] * 64,
    }
    matrices = {"gate_up": torch.randn(64, 512, 256), "down": torch.randn(64, 256, 256)}
    return {"logits": torch.randn(5, 64), "x": torch.randn(5, 256), "model": model} | blocks | matrices


def latent() -> dict[str, Any]:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    layer = DeepseekV3Attention(DeepseekV3Config(hidden_size=64, q_lora_rank=32, **heads), 0).bfloat16()
    return {
        "model": SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(self_attn=layer)])),
        "x": torch.randn(2, 64).bfloat16(),
        "cos": torch.ones(2, 64).bfloat16(),
        "sin": torch.zeros(2, 64).bfloat16(),
        "slot_mapping": torch.tensor([0, 128]),
        "block_tables": torch.tensor([[0], [1]], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 1], dtype=torch.int32),
    }


INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "attention_varlen": lambda: dict(zip("qkv", torch.randn(3, 100, 2, 32).unbind(), strict=True)),
    "cross_entropy": lambda: {
        "logits": torch.randn(6, 50, requires_grad=True),
        "target": torch.randint(0, 50, (6,)),
    },
    "embedding": lambda: {"ids": torch.randint(0, 9, (2, 3)), "table": torch.randn(9, 16)},
    "experts": experts,
    "gelu": normed,
    "layer_norm": normed,
    "linear": lambda: normed() | {"weight": torch.randn(64, 64)},
    "linear_cross_entropy": lambda: {
        "hidden": torch.randn(6, 16),
        "weight": torch.randn(50, 16),
        "target": torch.randint(0, 50, (6,)),
    },
    "mla": latent,
    "moe_route": lambda: {"logits": torch.randn(5, 64), "correction": torch.randn(64)},
    "packed_linear": lambda: {
        "model": SimpleNamespace(lm_head=torch.nn.Linear(64, 32)),
        "x": torch.randn(2, 64).half(),
    },
    "paged_attention": lambda: {
        "k": torch.randn(2, 8, 128).bfloat16(),
        "v": torch.randn(2, 8, 128).bfloat16(),
        "q": torch.randn(2, 32, 128).bfloat16(),
        "slot_mapping": torch.tensor([0, 16]),
        "block_tables": torch.tensor([[0], [1]], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 1], dtype=torch.int32),
    },
    "rms_norm": normed,
    "rope": lambda: {
        "q": torch.randn(1, 4, 7, 128),
        "k": torch.randn(1, 2, 7, 128),
        "positions": torch.arange(7)[None],
    },
    "softmax": lambda: {"x": torch.randn(4, 4), "mask": torch.ones(4, 4, dtype=torch.bool)},
}


def test_every_page_with_an_example_is_run() -> None:
    assert EXAMPLES.keys() == INPUTS.keys()


@pytest.mark.parametrize("page", EXAMPLES)
def test_examples_of_a_page_run(page: str) -> None:
    if page == "mla":
        pytest.importorskip("transformers")
    names = {name: getattr(ops, name) for name in ops.__all__}
    names |= {"torch": torch, "F": F, "opsmith": opsmith} | INPUTS[page]()
    for example in EXAMPLES[page]:
        exec(example, names)
    results = [names[name] for name in ("y", "loss", "ids") if isinstance(names.get(name), torch.Tensor)]
    results += [names["q"]] if page == "rope" else []
    assert results
    assert all(t.double().isfinite().all() for t in results)
