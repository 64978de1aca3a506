"""What all operators owe their callers: any layout of `out`, and errors that name the operator and the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import opsmith.ops as ops

_X, _PAIR = (70, 65), (2, 3, 40, 16)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


_COS, _SIN = ops.rope_table(16, 40)
_PACKED = ops.PackedLinear.from_linear(torch.nn.Linear(65, 80), format="int8")
_WITH_OUT: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda **o: ops.layer_norm(_x(*_X), _x(65), **o),
    "rms_norm": lambda **o: ops.rms_norm(_x(*_X), _x(65), **o),
    "gelu": lambda **o: ops.gelu(_x(*_X), **o),
    "bias_gelu": lambda **o: ops.bias_gelu(_x(*_X), _x(65), **o),
    "silu_mul": lambda **o: ops.silu_mul(_x(*_X), _x(*_X), **o),
    "gelu_mul": lambda **o: ops.gelu_mul(_x(70, 130), tanh=True, **o),
    "softmax": lambda **o: ops.softmax(_x(*_X), scale=0.3, **o),
    "rope": lambda **o: ops.rope(_x(*_PAIR), _COS, _SIN, **o),
    "attention": lambda **o: ops.attention(_x(*_PAIR), _x(*_PAIR), _x(*_PAIR), **o),
    "embedding": lambda **o: ops.embedding(torch.arange(70) % 5, _x(5, 65), **o),
    "quantized_embedding": lambda **o: ops.quantized_embedding(
        torch.arange(70) % 5, torch.arange(5 * 65).view(5, 65).to(torch.int8), torch.ones(5), **o
    ),
    "packed_linear": lambda **o: ops.packed_linear(
        _x(*_X), _PACKED.weight, _PACKED.scale, format="int8", **o
    ),
    "linear": lambda **o: ops.linear(_x(*_X), _x(80, 65), **o),
}


@pytest.mark.parametrize("name", _WITH_OUT)
@pytest.mark.parametrize("layout", ["every second column", "transposed", "rows with gaps"])
def test_out_of_any_layout_is_written_and_its_gaps_are_not(name: str, layout: str) -> None:
    expected = _WITH_OUT[name]()
    *leading, n = expected.shape
    if layout == "every second column":
        memory = torch.full((*leading, 2 * n), torch.nan)
        out, gaps = memory[..., ::2], memory[..., 1::2]
    elif layout == "transposed":
        out, gaps = torch.full((n, *leading), torch.nan).movedim(0, -1), torch.full((0,), torch.nan)
    else:
        memory = torch.full((*leading, n + 3), torch.nan)
        out, gaps = memory[..., :n], memory[..., n:]
    returned = _WITH_OUT[name](out=out)
    assert returned is out
    torch.testing.assert_close(out, expected)
    assert bool(gaps.isnan().all())


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_norm_writes_its_pair_into_any_layout(name: str) -> None:
    x, residual = _x(*_X), torch.ones(_X)
    expected = getattr(ops, name)(x, residual=residual)
    out = tuple(torch.full((70, 130), torch.nan)[:, ::2] for _ in range(2))
    returned = getattr(ops, name)(x, residual=residual, out=out)
    for got, into, right in zip(returned, out, expected, strict=True):
        assert got is into
        torch.testing.assert_close(into, right)


_OF_ONE: dict[str, Callable[[torch.Tensor], Any]] = {
    "layer_norm": lambda x: ops.layer_norm(x, residual=x)[0],
    "rms_norm": ops.rms_norm,
    "softmax": lambda x: ops.softmax(x, scale=0.5, mask=x > -1),
    "gelu": ops.gelu,
    "bias_gelu": lambda x: ops.bias_gelu(x, x[0]),
    "silu_mul": lambda x: ops.silu_mul(x, x),
    "gelu_mul": ops.gelu_mul,
    "rope": lambda x: ops.rope(x.reshape(1, 4, -1, 16), _COS, _SIN),
    "attention": lambda x: ops.attention(*[x.reshape(1, 4, -1, 16)] * 3, causal=True),
    "embedding": lambda x: ops.embedding(torch.arange(5), x),
    "linear": lambda x: ops.linear(x, x, activation="gelu"),
    "cross_entropy": lambda x: ops.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.int64)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's, about its own attention
@pytest.mark.parametrize("name", _OF_ONE)
@pytest.mark.parametrize("rows", [8, 80])  # less than a call of ours is worth, and more
def test_transforms_of_torch_func_reach_through(name: str, rows: int) -> None:
    call, several = (
        _OF_ONE[name],
        _x(3, rows, 64)[:, :32] if name in ("rope", "attention") else _x(3, rows, 64),
    )
    each = torch.stack([call(x) for x in several])
    torch.testing.assert_close(torch.func.vmap(call)(several), each, rtol=1e-4, atol=1e-5)
    x = several[0].clone().requires_grad_()
    call(x).square().sum().backward()
    gradient = torch.func.grad(lambda x: call(x).square().sum())(several[0])
    torch.testing.assert_close(gradient, x.grad, rtol=1e-3, atol=1e-4)


def test_gradients_for_each_sample() -> None:
    weight, several = _x(64), _x(5, 80, 64)
    grads = torch.func.vmap(torch.func.grad(lambda w, x: ops.rms_norm(x, w).square().sum()), (None, 0))(
        weight, several
    )
    for x, grad in zip(several, grads, strict=True):
        w = weight.clone().requires_grad_()
        ops.rms_norm(x, w).square().sum().backward()
        torch.testing.assert_close(grad, w.grad, rtol=1e-4, atol=1e-4)


_Q, _TABLES, _LENGTHS = torch.ones(1, 2, 16), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([1])
_STARTS, _TARGET = torch.tensor([0, 1]), torch.zeros(70, dtype=torch.int64)
_BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "layer_norm": (lambda: ops.layer_norm(_x(*_X), eps="a"), "eps"),  # type: ignore[arg-type]
    "rms_norm": (lambda: ops.rms_norm(_x(3, 4), eps="a"), "eps"),  # type: ignore[arg-type]
    "softmax": (lambda: ops.softmax(_x(*_X), scale="a"), "scale"),  # type: ignore[arg-type]
    "attention": (lambda: ops.attention(_x(*_PAIR), _x(*_PAIR), _x(*_PAIR), window=2.5), "window"),  # type: ignore[arg-type]
    "attention_varlen": (lambda: ops.attention_varlen(_Q, _Q, _Q, _STARTS, _STARTS, scale="a"), "scale"),  # type: ignore[arg-type]
    "paged_attention": (
        lambda: ops.paged_attention(_Q, _Q[None], _Q[None], _TABLES, _LENGTHS, softcap="a"),  # type: ignore[arg-type]
        "softcap",
    ),
    "rope": (lambda: ops.rope(_x(*_PAIR), _COS, _SIN, rotary_dim=8.0), "rotary_dim"),  # type: ignore[arg-type]
    "rope_table": (lambda: ops.rope_table(16.0, 4), "dim"),  # type: ignore[arg-type]
    "linear_rope": (
        lambda: ops.linear_rope(_x(40, 8), _x(48, 8), None, _COS, _SIN, heads="1", kv_heads=1, head_dim=16),  # type: ignore[arg-type]
        "heads",
    ),
    "cross_entropy": (lambda: ops.cross_entropy(_x(*_X), _TARGET, z_loss="a"), "z_loss"),  # type: ignore[arg-type]
    "linear_cross_entropy": (
        lambda: ops.linear_cross_entropy(_x(*_X), _x(9, 65), _TARGET, label_smoothing="a"),  # type: ignore[arg-type]
        "label_smoothing",
    ),
    "rms_norm_quant": (lambda: ops.rms_norm_quant(_x(3, 4), scale="a"), "scale"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", _BAD)
def test_what_is_no_number_is_named(name: str) -> None:
    call, argument = _BAD[name]
    with pytest.raises(TypeError, match=f"^{name}: .*{argument} must be a (whole )?number, got "):
        call()


@pytest.mark.parametrize("eps", [-1.0, torch.nan, torch.inf, 1e39])
@pytest.mark.parametrize("norm", [ops.layer_norm, ops.rms_norm, ops.rms_norm_quant])
def test_no_norm_takes_an_eps_that_makes_nan_of_it(norm: Any, eps: float) -> None:
    for rows in (1, 200):
        with pytest.raises(ValueError, match=rf"^{norm.__name__}: eps must be from 0 to 3.40282e\+38, got"):
            norm(_x(rows, 64), _x(64), eps=eps)
    assert norm(_x(3, 64), eps=0)[0].isfinite().all()
    wrong = {"x": _x(3, 64), "eps": eps, "weight": None, "residual": None, "bias": None, "scale": None}
    wrong |= {"offset": None, "weight_offset": 0.0, "round_before_weight": False, "y": torch.zeros(3, 64)}
    wrong |= {"q": torch.zeros(3, 64, dtype=torch.int8), "s": torch.zeros(3)}
    kernel = getattr(torch.ops.opsmith, norm.__name__).default
    known = {one.name for one in kernel._schema.arguments}
    with pytest.raises(RuntimeError, match="no eps"):
        kernel(**{name: value for name, value in wrong.items() if name in known})


@pytest.mark.parametrize("rows", [2, 200])
def test_label_smoothing_is_a_share_however_few_logits_there_are(rows: int) -> None:
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\], got -0.1"):
        ops.cross_entropy(_x(rows, 9), torch.zeros(rows, dtype=torch.int64), label_smoothing=-0.1)


def test_errors_found_by_another_operators_code_have_the_callers_name() -> None:
    with pytest.raises(IndexError, match=r"^linear_cross_entropy: targets"):
        ops.linear_cross_entropy(_x(2, 3), _x(5, 3), torch.tensor([1, 5]))
    with pytest.raises(IndexError, match=r"^rope_qk: positions"):
        ops.rope_qk(_x(*_PAIR), _x(*_PAIR), _COS, _SIN, positions=torch.full((40,), 40))
    with pytest.raises(ValueError, match=r"^silu_mul: gate must have at least 1 dimension"):
        ops.silu_mul(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"^linear_rope: weight must be a tensor"):
        ops.linear_rope(_x(40, 8), None, None, _COS, _SIN, heads=1, kv_heads=1, head_dim=16)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["bf16", "int8", "int8_dynamic", "int4"])
def test_a_packed_layer_takes_rows_of_its_size_only(format: str) -> None:
    # 63 columns are packed as 64 are, so the packed weight itself cannot tell.
    layer = ops.PackedLinear.from_linear(torch.nn.Linear(64, 32), format=format)
    for rows in (_x(3, 63), _x(63), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"packed_linear: input must be a tensor \[..., 64\], got "):
            layer(rows)
    with pytest.raises(TypeError, match="got list"):
        layer([1.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.Tensor.to_sparse, r"got torch\.sparse_coo; call to_dense\(\) first"),
        (torch.Tensor.to_mkldnn, r"got torch\._mkldnn; call to_dense\(\) first"),
        (lambda x: torch.nested.nested_tensor([x, x]), r"got a nested one; call to_padded_tensor\(\) first"),
    ],
)
@pytest.mark.parametrize("op", [ops.gelu, ops.layer_norm, ops.softmax])
def test_tensors_that_are_not_dense_are_named(op: Any, change: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"{op.__name__}: x must be a dense tensor, {message}"):
        op(change(_x(4, 8)))
