"""MLA's operators together: every rung gives the same, and the epilogues are the parts that they say they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.mla_rungs import RUNGS, thirteen_in_pytorch
from tests.ops.mla.sizes import Sizes, norm, row_of, turn

from opsmith.operator import Tolerance
from opsmith.ops import MLAWeights, mla_attention, mla_kv_epilogue, mla_preprocess, mla_q_epilogue
from opsmith.ops.mla.names import BESIDE

MATRIX = [Sizes(tokens=t, hidden=40, heads=h) for t in (0, 1, 2, 5, 31, 33, 128) for h in (1, 16)]
MATRIX += [Sizes(tokens=t, hidden=512, heads=h) for t in (1, 33) for h in (16, 77)]
MATRIX += [Sizes(tokens=40, hidden=101, heads=5, nope=9, rope=6, kv_lora=35, q_lora=33)]
MATRIX += [Sizes(tokens=1025, hidden=24, heads=2), Sizes(tokens=2, hidden=64, heads=128)]
MATRIX += [Sizes(tokens=5, hidden=d, heads=2, q_lora=96) for d in (5120, 7168)]
MATRIX += [Sizes(tokens=3, hidden=33, heads=5, nope=7, rope=6, kv_lora=19, q_lora=None)]
MATRIX += [Sizes(tokens=9, hidden=50, heads=5, nope=12, rope=2, kv_lora=101, q_lora=1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", MATRIX, ids=lambda s: "-".join(map(str, s.__dict__.values())))
def test_sizes_within_the_tolerance_on_every_rung(sizes: Sizes, dtype: torch.dtype) -> None:
    rounded, w, wide = dtype, sizes.weights(dtype), sizes.weights(dtype).double()

    def run(rung: Callable[..., Any], seed: int, dtype: torch.dtype, w: MLAWeights) -> list[torch.Tensor]:
        x, cos, sin = (t.to(dtype) for t in sizes.inputs(rounded, seed))
        cache = sizes.cache(block_size=16, dtype=dtype)
        return [*rung(x, w, cos, sin, sizes.slots(cache), cache), cache.latent, cache.rope]

    exact = {seed: run(mla_preprocess, seed, torch.float64, wide) for seed in (1, 2, 3)}
    # Eager's error in one short call is a matter of luck, so three are asked.
    eager = {seed: run(thirteen_in_pytorch, seed, dtype, w) for seed in exact}
    for name, rung in RUNGS.items():
        for part, got in enumerate(run(rung, 1, dtype, w)):
            if not sizes.tokens:
                assert not got.any()
                continue
            bounds = [Tolerance().check(got, eager[s][part], exact[s][part]).bound for s in exact]
            error = float((got.double() - exact[1][part]).abs().max())
            assert error <= max(bounds), f"{name}, result {part}: {error:.3g} above {max(bounds):.3g}"


@pytest.mark.parametrize("quant", ["per_tensor", "per_token", "weight_int8", "weight_int4"])
def test_rungs_agree_on_quantized_weights(quant: str) -> None:
    sizes = Sizes(tokens=33, hidden=64, q_lora=32)
    w = sizes.weights().quantize(quant)
    x, cos, sin = sizes.inputs()
    found = {}
    for name in ("thirteen operators, PyTorch", "two fused chains", "one operator"):
        cache = sizes.cache()
        found[name] = (*RUNGS[name](x, w, cos, sin, sizes.slots(cache), cache), cache.latent, cache.rope)
    for name, results in found.items():
        for got, right in zip(results, found["one operator"], strict=True):
            # An activation at a tie may round either way: one step of 127 in one of 64 inputs.
            assert (got - right).abs().max() <= right.abs().max() / 64, name
            assert ((got - right).abs() <= 1e-5 * right.abs().max()).double().mean() > 0.95, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("mode", ["joint", "split", "tiled", "int8_tiled"])
def test_keys_go_to_their_slots_and_nowhere_else(mode: str, interleaved: bool, dtype: torch.dtype) -> None:
    sizes = Sizes(tokens=6)
    _, cos, sin = sizes.inputs(dtype)
    a, gamma = torch.randn(6, 32 + 16 + 5, dtype=dtype), torch.rand(32, dtype=dtype) + 0.5
    cache = sizes.cache(mode, 4, dtype)
    slots = sizes.slots(cache)
    scale = 0.03 if mode == "int8_tiled" else None
    mla_kv_epilogue(a, gamma, cos, sin, slots, cache, interleaved=interleaved, ctkv_scale=scale)
    assert cache.kv_lora == 32
    if scale is not None:
        assert cache.ctkv_scale == torch.tensor(scale)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_nope, k_rope = row_of(cache, slot, 32)
            row, c, s = (v[t].double().numpy() for v in (a, cos, sin))
            right = norm(row[:32], gamma.double().numpy(), None, 1e-6)
            right = right if scale is None else np.rint(np.clip(right / scale, -128, 127))
            np.testing.assert_allclose(k_nope, right, rtol=0, atol=1e-5 if scale is None else 1)
            np.testing.assert_allclose(k_rope, turn(row[32:48], c, s, interleaved), rtol=0, atol=1e-5)
    for slot in set(range(cache.blocks * cache.block_size)) - set(slots.tolist()):
        assert not np.concatenate(row_of(cache, slot, 32)).any(), f"slot {slot} was written"


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("tokens", [1, 35])
def test_queries_are_absorbed_and_rotated(tokens: int, joint: bool) -> None:
    _, cos, sin = Sizes(tokens=tokens).inputs()
    q, wuk = torch.randn(tokens, 3, 8 + 16), torch.randn(3, 8, 32)
    q_out, q_rope = mla_q_epilogue(q, wuk, cos, sin, joint=joint)
    if joint:
        assert q_rope is None
        q_out, q_rope = q_out.split((32, 16), -1)
    assert q_rope is not None
    right = torch.einsum("thn,hnk->thk", q[..., :8].double(), wuk.double())
    torch.testing.assert_close(q_out.double(), right, rtol=1e-5, atol=1e-5)
    for t in range(tokens):
        for h in range(3):
            turned = turn(*(v.double().numpy() for v in (q[t, h, 8:], cos[t], sin[t])), False)
            np.testing.assert_allclose(q_rope[t, h].numpy(), turned, rtol=0, atol=1e-5)
    scale = torch.tensor([20.0, -31.0, 45.0])
    integers, beside = mla_q_epilogue(q, wuk, cos, sin, q_nope_scale=scale)
    assert integers.dtype == torch.int8
    off = integers.double() - (right * scale[:, None]).clamp(-128, 127).round()
    assert off.abs().max() <= 1
    assert beside is not None
    assert torch.equal(beside, q_rope)


def test_gradients_reach_what_the_epilogues_read() -> None:
    sizes = Sizes(tokens=3)
    _, cos, sin = sizes.inputs(torch.float64)
    a, gamma, q, wuk = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 48), (32,), (3, 3, 24), (3, 8, 32))
    )

    def both(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, gamma, q, wuk = args
        cache = sizes.cache("joint", 4, torch.float64)
        mla_kv_epilogue(a, gamma, cos, sin, torch.tensor([2, -1, 1]), cache)
        return cache.latent, mla_q_epilogue(q, wuk, cos, sin, joint=True)[0]

    assert torch.autograd.gradcheck(both, (a, gamma, q, wuk))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(3, 47)}, r"a must have shape \[T, 48 or more\]"),
        ({"cos": torch.zeros(3, 12)}, r"sin must have shape \[3, 12\] to fit a, got \(3, 16\)"),
        ({"slot_mapping": torch.tensor([0, 1, 99])}, "slot_mapping must lie in"),
        ({"ctkv_scale": 0.1}, 'ctkv_scale is for cache mode "int8_tiled"'),
        ({"cache": None}, "cache must be an MLACache"),
        ({"eps": -1e-6}, "eps must be from 0"),
        ({"eps": torch.nan}, "eps must be from 0"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_wrong_keys_are_named_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    sizes = Sizes(tokens=3)
    _, cos, sin = sizes.inputs()
    cache = sizes.cache()
    call = {"a": torch.ones(3, 48), "gamma2": torch.ones(32), "cos": cos, "sin": sin, "cache": cache}
    with pytest.raises((TypeError, ValueError), match=f"mla_kv_epilogue: .*{message}"):
        mla_kv_epilogue(**{**call, "slot_mapping": torch.arange(3), **change})
    assert not cache.latent.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 2, 24)}, r"wuk must have shape \[2, nope, kv_lora\] to fit q"),
        ({"wuk": torch.zeros(3, 8, 32).half()}, "wuk must be float32"),
        ({"sin": torch.zeros(3, 8)}, r"sin must have shape \[3, 16\] to fit q, got \(3, 8\)"),
        ({"q_nope_scale": torch.ones(2)}, r"q_nope_scale must have shape \(3,\)"),
        ({"q_nope_scale": torch.ones(3), "joint": True}, "int8 queries and their rope part have two dtypes"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_wrong_queries_are_named(change: dict[str, Any], message: str) -> None:
    _, cos, sin = Sizes(tokens=3).inputs()
    call = {"q": torch.ones(3, 3, 24), "wuk": torch.ones(3, 8, 32), "cos": cos, "sin": sin}
    with pytest.raises((TypeError, ValueError), match=f"mla_q_epilogue: .*{message}"):
        mla_q_epilogue(**{**call, **change})


def test_arguments_have_two_names() -> None:
    sizes = Sizes()
    w, (x, cos, sin) = sizes.weights(beta0=True, beta1=True, bias0=True, bias1=True), sizes.inputs()
    named = {ours: getattr(w, cann) for ours, cann in BESIDE.items() if hasattr(w, cann)}
    given = {ours: t for ours, t in named.items() if t is not None}
    assert len(given) == 11
    dims = {name: getattr(w, name) for name in ("heads", "nope", "rope", "kv_lora", "q_lora")}
    same = MLAWeights(**given, **dims)
    assert all(torch.equal(t, same.state_dict()[name]) for name, t in w.state_dict().items())
    cache, other = sizes.cache(mode="int8_tiled"), sizes.cache(mode="int8_tiled")
    slots, scales = sizes.slots(cache), (torch.tensor(0.03), torch.tensor([20.0, -31.0, 45.0]))
    cann = dict(zip(("slot_mapping", "ctkv_scale", "q_nope_scale"), (slots, *scales), strict=True))
    ours = dict(zip(("slots", "latent_scale", "query_scale"), (slots, *scales), strict=True))
    right = mla_preprocess(x, w, cos, sin, cache=cache, **cann)
    got = mla_preprocess(x, same, cos, sin, cache=other, **ours)
    tables, lens = torch.arange(cache.blocks).view(1, -1), torch.tensor([5])
    y = mla_attention(*right, cache, tables, lens, scale=0.1, wuv=w.wuv)
    assert torch.equal(y, mla_attention(*got, other, tables, lens, scale=0.1, v_up=w.wuv))
    assert all(map(torch.equal, (*got, other.latent), (*right, cache.latent)))


def test_one_argument_under_both_names_is_refused() -> None:
    w = Sizes().weights()
    with pytest.raises(TypeError, match="k_up and wuk are one argument"):
        mla_q_epilogue(torch.randn(2, 3, 24), wuk=w.wuk, k_up=w.wuk, cos=None, sin=None)


def test_int8_checkpoints_have_two_names() -> None:
    sizes = Sizes()
    w = sizes.weights().quantize("per_token")
    dims = {name: getattr(w, name) for name in ("heads", "nope", "rope", "kv_lora", "q_lora")}
    made = MLAWeights.quantized(
        down_int8=w.wdqkv,
        up_int8=w.wuq,
        k_up=w.wuk,
        down_descale=w.descale0,
        up_descale=w.descale1,
        input_norm=w.gamma0,
        q_norm=w.gamma1,
        kv_norm=w.gamma2,
        v_up=w.wuv,
        **dims,
    )
    assert made.quant == "per_token"
    assert all(torch.equal(t, made.state_dict()[name]) for name, t in w.state_dict().items())
