"""Embeddings that read the rows of a packed weight, and a tied output layer that shares it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opsmith
from opsmith.compiler.modules.embeddings import Rows
from opsmith.compiler.modules.quantize import Standing

QUIET = opsmith.Config(tune=False, inductor=False, quantize="int8", quantize_embedding=True)


class Scaled(nn.Embedding):
    """Rows times a number, as Gemma's."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, padding_idx=0)
        self.scale = nn.Buffer(torch.tensor(sizes[1] ** 0.5), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale.to(self.weight.dtype)


class Shifted(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Tied(nn.Module):
    """Numbers of tokens to logits, by one table."""

    def __init__(self, words: int = 80, width: int = 52, made: Any = nn.Embedding, tied: bool = True) -> None:
        super().__init__()
        self.embed = made(words, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(F.silu(self.middle(self.embed(ids))))  # type: ignore[no-any-return]


def made(*args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return Tied(*args, **options).eval()


def call(model: nn.Module, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(ids)


def truth(model: Any, ids: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """In float64, with the weights as they were rounded: rows of the head's are what the embedding gives."""
    with torch.no_grad():
        head, middle = (m.forward.__self__.dequantize(torch.float64) for m in (model.head, model.middle))
        rows = model.embed.forward.__self__.dequantize(torch.float64)[ids] * factor
        return F.silu(rows @ middle.t() + model.middle.bias.double()) @ head.t()


@pytest.mark.parametrize("words", [32, 48, 80, 83, 1, 200])
@pytest.mark.parametrize("width", [1, 8, 52])
def test_rows_are_those_of_the_packed_weight(words: int, width: int) -> None:
    """Whole panels and less, the last one of sixteen rows, and padding at a row's end."""
    torch.manual_seed(0)
    packed = Standing.from_linear(nn.Linear(width, words), format="int8")
    assert isinstance(packed, Standing)
    ids = torch.arange(words)
    assert Rows.of(packed, 1.0).read(ids.view(1, -1)).equal(packed.dequantize()[None])
    for wrong in (-1, words):
        with pytest.raises(IndexError):
            Rows.of(packed, 1.0).read(torch.tensor([wrong]))


@pytest.mark.parametrize("format", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("cls", [nn.Embedding, Scaled])
def test_one_packed_weight_serves_both(cls: Any, format: str) -> None:
    model, ids = made(made=cls), torch.tensor([[3, 79, 0, 64, 63]])
    before, state = call(model, ids), copy.deepcopy(model.state_dict())
    opsmith.optimize(model, ids, config=QUIET, quantize=format)
    rows, head = (m.forward.__self__ for m in (model.embed, model.head))
    assert rows.weight.data_ptr() == head.weight.data_ptr()
    assert rows.scale.data_ptr() == head.scale.data_ptr()
    report = model.opsmith.report
    assert "embedding: embed reads the rows of head" in str(report)
    assert "quantized: 2 linear layers" in str(report)
    if format == "int8":
        assert torch.allclose(call(model, ids).double(), truth(model, ids, rows.factor), rtol=1e-5, atol=1e-5)
    assert torch.allclose(call(model, ids), before, rtol=0.1, atol=0.05 * float(before.abs().max()))
    assert all(model.state_dict()[name].equal(t) for name, t in state.items())
    twin = copy.deepcopy(model)
    assert call(twin, ids).equal(call(model, ids))
    assert isinstance(twin.embed.forward.__self__, Rows)
    opsmith.restore(model)
    assert call(model, ids).equal(before)
    assert "forward" not in vars(model.embed)


def test_a_bfloat16_table_is_what_its_class_makes_of_the_rows() -> None:
    model, ids = made(made=Scaled).to(torch.bfloat16), torch.tensor([[3, 79, 0, 64, 63]])
    opsmith.optimize(model, ids, config=QUIET)
    rows = model.embed.forward.__self__.dequantize()[ids].to(torch.bfloat16)
    assert model.embed(ids).dtype == torch.bfloat16
    assert model.embed(ids).equal(rows * model.embed.scale.to(torch.bfloat16))


def test_a_table_of_its_own_is_packed_by_itself() -> None:
    model, ids = made(tied=False), torch.tensor([[3, 79, 0]])
    opsmith.optimize(model, ids, config=QUIET)
    assert "embedding: embed reads the rows of its own" in str(model.opsmith.report)
    assert torch.allclose(call(model, ids).double(), truth(model, ids), rtol=1e-5, atol=1e-5)
    model = made()
    opsmith.optimize(model, ids, config=QUIET.model_copy(update={"quantize_skip": ["head"]}))
    assert "embedding: embed reads the rows of its own" in str(model.opsmith.report)
    model = made()
    opsmith.optimize(model, ids, config=QUIET, quantize="int4")
    assert "embedding: embed reads the rows of " in str(model.opsmith.report)


def test_the_float_table_goes_back_where_one_packed_weight_serves_both() -> None:
    model, ids = made(made=Scaled), torch.tensor([[3, 79, 0]])
    opsmith.optimize(model, ids, config=QUIET)
    expected = call(model, ids)
    model = made(made=Scaled)
    before = model.embed.weight.nbytes + model.middle.weight.nbytes
    opsmith.optimize(model, ids, config=QUIET.model_copy(update={"quantize_release": True}))
    assert model.embed.weight.is_meta
    assert model.embed.weight is model.head.weight
    assert sum(layer.released for layer in model.opsmith.report.quantized) == before
    assert call(model, ids).equal(expected)
    with pytest.raises(ValueError, match="load the model anew"):
        opsmith.restore(model)
    kept = made()
    opsmith.optimize(
        kept, ids, config=QUIET.model_copy(update={"quantize_release": True, "quantize_embedding": False})
    )
    assert not kept.embed.weight.is_meta


def test_what_is_no_table_of_rows_is_left() -> None:
    ids = torch.tensor([[3, 79, 0]])
    model = made(made=Shifted)
    opsmith.optimize(model, ids, config=QUIET)
    assert "not quantized: embed left: its class, Shifted, gives something else" in str(model.opsmith.report)
    model = made(made=lambda *sizes: nn.Embedding(*sizes, max_norm=1.0))
    opsmith.optimize(model, ids, config=QUIET)
    assert "embed left" in str(model.opsmith.report)
    model = made()
    opsmith.optimize(model, ids, config=QUIET.model_copy(update={"quantize_skip": ["emb*"]}))
    assert "matches 'emb*'" in str(model.opsmith.report)
    with pytest.raises(ValueError, match="quantize_embedding goes with quantize"):
        opsmith.optimize(made(), ids, config=opsmith.Config(quantize_embedding=True))


def test_a_wrong_id_is_refused_as_before() -> None:
    model, ids = made(), torch.tensor([[3, 79, 0]])
    opsmith.optimize(model, ids, config=QUIET)
    for wrong in (-1, 80):
        with pytest.raises((IndexError, RuntimeError)):
            call(model, torch.tensor([[3, wrong, 0]]))


def test_generating_without_the_float_table() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)).eval()
    ids = torch.randint(3, 99, (1, 5))
    opsmith.optimize(model, config=QUIET)
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    opsmith.restore(model)
    example = {"input_ids": ids, "use_cache": False}
    opsmith.optimize(model, example, config=QUIET.model_copy(update={"quantize_release": True}))
    assert model.lm_head.weight.is_meta
    assert model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None).equal(tokens)


def test_a_models_own_table_of_few_bits_keeps_its_scales_in_another_dtype() -> None:
    table = torch.randn(80, 52, generator=torch.Generator().manual_seed(3))
    own = opsmith.ops.QuantizedEmbedding.from_float(table)
    model, ids = nn.Sequential(own, nn.Linear(52, 40)).eval(), torch.tensor([[3, 79, 0, 3]])
    expected = copy.deepcopy(model).to(torch.bfloat16)
    config = opsmith.Config(tune=False, inductor=False)
    opsmith.optimize(model, (ids,), dtype=torch.bfloat16, config=config)
    assert (own.scale.dtype, own.dtype) == (torch.float32, torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), expected(ids), rtol=2**-7, atol=2**-9)
    opsmith.restore(model)
    assert own.dtype == torch.float32
    assert own(ids).equal(own.dequantize()[ids])
