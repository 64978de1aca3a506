"""Latent attention against attention over keys and values that are made for every head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ops.mla.sizes import Sizes

from opsmith.ops import MLACache, mla_attention, mla_preprocess

MODES = ("joint", "split", "tiled", "int8_tiled")


def filled(mode: str, lens: list[int], size: int, kv_lora: int = 32, rope: int = 16) -> Any:
    """A cache of random rows in scattered blocks, the rows of each sequence, and its table."""
    pages = max(1, -(-max(lens) // size))
    cache = MLACache.allocate(
        mode, pages * len(lens) + 2, size, kv_lora=kv_lora, rope=rope, dtype=torch.float32
    )
    for t in (cache.latent, cache.rope):
        if t is not None:
            t.fill_(100 if t.dtype == torch.int8 else torch.nan)  # what no sequence holds is not read
    tables = (torch.randperm(cache.blocks)[: pages * len(lens)]).view(len(lens), pages)
    rows = []
    for s, n in enumerate(lens):
        nope = torch.randint(-127, 128, (n, kv_lora)) if mode == "int8_tiled" else torch.randn(n, kv_lora)
        nope = nope.to(cache.latent.dtype)
        turned = torch.randn(n, rope)
        slots = tables[s, torch.arange(n) // size] * size + torch.arange(n) % size
        cache.write(slots, nope, turned)
        rows.append((nope, turned))
    return cache, rows, tables


def by_hand(
    q: torch.Tensor, q_rope: torch.Tensor, rows: Any, wuv: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Each sequence, token and head for itself, in float64, with keys and values of its own."""
    out, each = [], len(q) // len(rows)
    for s, (nope, turned) in enumerate(rows):
        for i in range(each):
            end = len(nope) - each + i + 1
            for h in range(q.shape[1]):
                t = s * each + i
                keys = nope[:end].double()
                scores = scale * (keys @ q[t, h].double() + turned[:end].double() @ q_rope[t, h].double())
                latent = torch.softmax(scores, 0) @ keys
                out.append(latent if wuv is None else wuv[h].double() @ latent)
    return torch.stack(out).view(len(q), q.shape[1], -1)


@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 16, 128])
def test_every_layout_gives_the_same_as_keys_and_values_would(mode: str, size: int, each: int) -> None:
    cache, rows, tables = filled(mode, [33, 5, 60], size)
    tokens = 3 * each
    wuv = torch.randn(4, 10, 32)
    q, q_rope = torch.randn(tokens, 4, 32), torch.randn(tokens, 4, 16)
    scales: dict[str, Any] = {}
    if mode == "int8_tiled":
        q = torch.randint(-127, 128, q.shape, dtype=torch.int8)
        scales = {"ctkv_scale": 0.02, "q_nope_scale": torch.tensor([40.0, -50.0, 60.0, 70.0])}
        meant = q / scales["q_nope_scale"][:, None]
        right = by_hand(meant, q_rope, [(n * 0.02, r) for n, r in rows], wuv, 0.2)
    else:
        right = by_hand(q, q_rope, rows, wuv, 0.2)
    pair = (torch.cat((q, q_rope), -1), None) if mode == "joint" else (q, q_rope)
    lens = torch.tensor([33, 5, 60])
    got = mla_attention(*pair, cache, tables, lens, scale=0.2, wuv=wuv, **scales)
    torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)
    if each == 1:
        latent = mla_attention(*pair, cache, tables.int(), lens.int(), scale=0.2, **scales)
        torch.testing.assert_close(torch.einsum("thk,hvk->thv", latent, wuv), got, rtol=1e-4, atol=1e-4)


def test_an_int8_cache_remembers_its_scales() -> None:
    sizes = Sizes()
    x, cos, sin = sizes.inputs()
    w = sizes.weights()
    cache, plain = sizes.cache("int8_tiled"), sizes.cache("tiled")
    scales = {"ctkv_scale": 0.03, "q_nope_scale": torch.full((3,), 30.0)}
    q = mla_preprocess(x, w, cos, sin, torch.arange(5), cache, **scales)
    q_plain = mla_preprocess(x, w, cos, sin, torch.arange(5), plain)
    call = {"block_tables": torch.tensor([[0]]), "seq_lens": torch.tensor([5]), "scale": 0.2, "wuv": w.wuv}
    got, right = mla_attention(*q, cache, **call), mla_attention(*q_plain, plain, **call)
    assert float((got - right).norm() / right.norm()) < 0.05
    assert torch.equal(mla_attention(*q, cache, **call, **scales), got)


def test_a_sequence_without_rows_gives_zeros() -> None:
    cache, _, tables = filled("split", [3, 4], 16)
    q, q_rope = torch.randn(2, 4, 32), torch.randn(2, 4, 16)
    got = mla_attention(q, q_rope, cache, tables, torch.tensor([0, 4]), scale=1.0)
    assert not got[0].any()
    assert got[1].isfinite().all()


def test_gradients_reach_queries_cache_and_values() -> None:
    latent, rope = torch.randn(2, 4, 1, 6).double(), torch.randn(2, 4, 1, 2).double()
    leaves = [torch.randn(2, 3, 6), torch.randn(2, 3, 2), torch.randn(3, 5, 6)]
    leaves = [t.double().requires_grad_() for t in (*leaves, latent, rope)]

    def run(q: Any, q_rope: Any, wuv: Any, latent: Any, rope: Any) -> torch.Tensor:
        cache = MLACache("split", latent, rope)
        return mla_attention(q, q_rope, cache, torch.tensor([[1, 0]]), torch.tensor([7]), scale=0.3, wuv=wuv)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_out": torch.zeros(2, 4)}, ValueError, r"q_out must be a tensor \[T, H, kv_lora\], got \(2, 4\)"),
        (
            {"q_out": torch.zeros(2, 4, 31)},
            ValueError,
            r"cache.latent must have shape.*31.*got \(4, 16, 1, 32\)",
        ),
        ({"q_rope": torch.zeros(2, 4, 8)}, ValueError, r"q_rope must be \[T, H, 16\].*got \(2, 4, 8\)"),
        (
            {"q_rope": torch.zeros(2, 3, 16)},
            ValueError,
            r"q_out must have shape \[2, 3, kv_lora\] to fit q_rope, got \(2, 4, 32\)",
        ),
        (
            {"q_out": torch.zeros(2, 4, 32).half()},
            TypeError,
            "q_out must be float32 like q_rope, got float16",
        ),
        ({"wuv": torch.zeros(4, 32, 10)}, ValueError, r"wuv must have shape.*got \(4, 32, 10\)"),
        (
            {"block_tables": torch.tensor([0, 1])},
            ValueError,
            r"block_tables must have shape \[S, n\], got \(2,\)",
        ),
        (
            {"block_tables": torch.tensor([[0], [4]])},
            ValueError,
            r"\[0, 4\).*got 4 for block 0 of sequence 1",
        ),
        ({"block_tables": torch.tensor([[0.0], [1.0]])}, TypeError, "block_tables must be int64 or int32"),
        (
            {"seq_lens": torch.tensor([3])},
            ValueError,
            r"seq_lens must have shape \[2\] to fit the cache, got \(1,\)",
        ),
        ({"seq_lens": torch.tensor([3, 17])}, ValueError, r"seq_lens must lie in \[0, 16\].*got 17"),
        ({"seq_lens": torch.tensor([-1, 3])}, ValueError, "got -1"),
        ({"ctkv_scale": 1.0}, ValueError, 'ctkv_scale is for cache mode "int8_tiled"'),
        ({"cache": None}, TypeError, "cache must be an MLACache, got NoneType"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {
        "q_out": torch.zeros(2, 4, 32),
        "q_rope": torch.zeros(2, 4, 16),
        "cache": filled("split", [3, 4], 16)[0],
        "block_tables": torch.tensor([[0], [1]]),
        "seq_lens": torch.tensor([3, 4]),
        "scale": 1.0,
    }
    with pytest.raises(error, match=f"mla_attention: .*{message}"):
        mla_attention(**{**call, **change})


def test_a_joint_cache_must_know_how_its_rows_divide() -> None:
    cache = MLACache("joint", torch.zeros(1, 4, 1, 48))
    call = {"block_tables": torch.tensor([[0]]), "seq_lens": torch.tensor([1]), "scale": 1.0}
    with pytest.raises(ValueError, match="nothing tells kv_lora from rope"):
        mla_attention(torch.zeros(1, 2, 48), None, cache, **call)
    cache.kv_lora = 32
    assert mla_attention(torch.zeros(1, 2, 48), None, cache, **call).shape == (1, 2, 32)


@pytest.mark.parametrize("lens", [[9, 30], [700, 0]])
def test_scores_of_minus_infinity_are_not_zeros(lens: list[int]) -> None:
    cache, _, tables = filled("split", lens, 16)
    q, q_rope = torch.randn(2, 3, 32), torch.randn(2, 3, 16)
    cache.latent.copy_(cache.latent.nan_to_num(0.0).abs() + 1)
    q[0, 1] = -torch.inf
    out = mla_attention(q, q_rope, cache, tables, torch.tensor(lens), scale=0.3)
    assert out[0, 1].isnan().all()
    assert out[0, [0, 2]].isfinite().all()
    assert out[1].isfinite().all()
    assert (out[1] == 0).all() == (lens[1] == 0)


def test_a_cache_of_rank_zero_gives_zeros() -> None:
    cache, _, tables = filled("split", [9, 30], 16, kv_lora=0)
    q, q_rope, wuv = torch.randn(2, 3, 0), torch.randn(2, 3, 16), torch.randn(3, 10, 0)
    for _ in range(20):  # what is not written shows as what memory held
        out = mla_attention(q, q_rope, cache, tables, torch.tensor([9, 30]), scale=0.3, wuv=wuv)
        assert torch.equal(out, torch.zeros(2, 3, 10))
        out.fill_(7.0)


def test_gradients_of_no_heads_are_empty() -> None:
    cache, _, tables = filled("split", [9, 30], 16)
    q, q_rope = torch.randn(2, 0, 32, requires_grad=True), torch.randn(2, 0, 16, requires_grad=True)
    wuv = torch.randn(0, 10, 32, requires_grad=True)
    out = mla_attention(q, q_rope, cache, tables, torch.tensor([9, 30]), scale=0.3, wuv=wuv)
    assert out.shape == (2, 0, 10)
    (grad,) = torch.autograd.grad(out.sum(), wuv)
    assert grad.shape == wuv.shape
