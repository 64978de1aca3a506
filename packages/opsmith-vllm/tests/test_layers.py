"""Each layer beside vLLM's own on the same numbers, and float64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding

from opsmith.operator import Tolerance
from opsmith_vllm import layers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    """Layers ask for one when they are made."""
    with set_current_vllm_config(VllmConfig()):
        yield


@torch.no_grad()
def held(
    layer: Any,
    ours: Callable[..., Any],
    own: Callable[..., Any],
    *inputs: torch.Tensor,
    truth: Callable[..., Any] | None = None,
) -> None:
    """Hold a layer to float64: vLLM's own arithmetic, or `truth` where that is never done in float64."""
    got, eager = ours(layer, *map(torch.clone, inputs)), own(layer, *map(torch.clone, inputs))
    exact = (truth or own)(layer.double(), *(t.double() for t in inputs))
    triples = (
        [(got, eager, exact)] if isinstance(got, torch.Tensor) else [*zip(got, eager, exact, strict=True)]
    )
    for triple in triples:
        verdict = Tolerance().check(*triple)
        assert verdict.ok, verdict


def filled(layer: Any, dtype: torch.dtype) -> Any:
    """The layer with random weights."""
    layer = layer.to(dtype)
    for weight in layer.parameters():
        weight.data.normal_()
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 640), (5, 3, 33)])
@pytest.mark.parametrize(
    ("ours", "own"), [(layers.OpsmithRMSNorm, RMSNorm), (layers.OpsmithGemmaRMSNorm, GemmaRMSNorm)]
)
def test_norms(ours: Any, own: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, *shape).to(dtype)
    for inputs in ((x,), (x, residual)):
        layer = filled(ours(shape[-1]), dtype)
        held(layer, ours.forward_native, own.forward_native, *inputs, truth=normalized)


def normalized(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """The formula, in the dtype of x."""
    s = x if residual is None else x + residual
    weight = layer.weight + 1 if isinstance(layer, GemmaRMSNorm) else layer.weight
    y = s / (s.square().mean(-1, keepdim=True) + layer.variance_epsilon).sqrt() * weight
    return y if residual is None else (y, s)


def test_a_norm_of_a_part_of_the_row_is_vllm_s_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    layer = filled(layers.OpsmithRMSNorm(64, var_hidden_size=32), torch.float32)
    assert torch.equal(layer(x), RMSNorm.forward_native(layer, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (9, 192), (2, 3, 66)])
@pytest.mark.parametrize(
    ("make", "own"),
    [
        (layers.OpsmithSiluAndMul, SiluAndMul.forward_native),
        (layers.OpsmithGeluAndMul, GeluAndMul.forward_native),
        (lambda: layers.OpsmithGeluAndMul("tanh"), GeluAndMul.forward_native),
    ],
)
def test_activations(make: Any, own: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = make()
    held(
        layer,
        lambda _, x: layer(x),
        lambda _, x: own(x) if isinstance(layer, SiluAndMul) else own(layer, x),
        torch.randn(shape).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("rotated", "keys"), [(64, 2), (32, 2), (64, 0)])
@pytest.mark.parametrize("scaled", [False, True])
def test_rotary(scaled: bool, rotated: int, keys: int, neox: bool, dtype: torch.dtype) -> None:
    """On slices of one projection, as models have them."""
    torch.manual_seed(0)
    ours = {one.__name__: one for one in layers.rotary_classes()}
    own: Any = Llama3RotaryEmbedding if scaled else RotaryEmbedding
    scaling = (8.0, 1.0, 4.0, 128) if scaled else ()
    layer = ours[f"Opsmith{own.__name__}"](64, rotated, 256, 10000.0, neox, dtype, *scaling)
    qkv = torch.randn(6, (4 + keys) * 64).to(dtype)
    q, k = qkv.split([4 * 64, keys * 64], -1)
    positions = torch.tensor([0, 3, 255, 7, 7, 100])
    held(
        layer,
        lambda layer, *given: [t for t in layer(positions, *given) if t is not None],
        lambda layer, *given: [t for t in own.forward_native(layer, positions, *given) if t is not None],
        *([q, k] if keys else [q]),
    )
