"""Cost formulas, held to programs that count every multiplication and every byte one by one."""

import itertools
import math

import pytest
import torch

from opsmith.call.layouts import nbytes
from opsmith.profiler.costs import attention, bare, cost_of, pairs
from opsmith.profiler.entries import card_of, kind_of


def dense(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64


def counted_product(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Multiplications and additions of a matmul, one by one."""
    count = 0
    batch = torch.broadcast_shapes(a[:-2], b[:-2])
    for _ in itertools.product(*(range(n) for n in batch)):
        for _i, _j, _k in itertools.product(range(a[-2]), range(b[-1]), range(a[-1])):
            count += 2
    return count


def counted_attention(q: tuple[int, ...], keys: int, wide: int, causal: bool) -> int:
    """Multiplications and additions of both products, over the pairs that PyTorch's own mask keeps."""
    batch, heads, length, width = q
    mask = torch.ones(length, keys, dtype=torch.bool)
    if causal:
        mask = mask.tril()
    count = 0
    for _ in range(batch * heads):
        for i, j in itertools.product(range(length), range(keys)):
            if mask[i, j]:
                count += 2 * width + 2 * wide
    return count


@pytest.mark.parametrize(("a", "b"), [((3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (6, 4, 2))])
def test_products_are_counted(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    name = "aten::mm" if len(a) == 2 else "aten::matmul"
    cost = cost_of(name, [dense(a, F32), dense(b, F32)])
    assert cost is not None
    result = torch.empty(a) @ torch.empty(b)
    assert cost.flops == counted_product(a, b)
    assert cost.min_bytes == 4 * (math.prod(a) + math.prod(b) + result.numel())


def test_a_linear_layer_with_a_bias() -> None:
    cost = cost_of("aten::linear", [dense((2, 3, 4), BF16), dense((5, 4), BF16), dense((5,), BF16)])
    assert cost is not None
    assert cost.flops == counted_product((6, 4), (4, 5))
    assert cost.min_bytes == 2 * (24 + 20 + 5 + 30)
    again = cost_of("aten::addmm", [dense((5,), BF16), dense((6, 4), BF16), dense((4, 5), BF16)])
    assert again == cost


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "keys"), [(4, 4), (3, 7), (7, 3), (1, 5), (5, 1)])
def test_attention_counts_the_pairs_it_computes(length: int, keys: int, causal: bool) -> None:
    q = dense((2, 4, length, 8), F32)
    k, v = dense((2, 2, keys, 8), F32), dense((2, 2, keys, 6), F32)  # two query heads share a head of keys
    cost = cost_of("aten::scaled_dot_product_attention", [q, k, v, None, 0.0, causal])
    assert cost is not None
    assert cost.flops == counted_attention(q.shape, keys, 6, causal)
    assert cost.min_bytes == 4 * (q.numel() + k.numel() + v.numel() + 2 * 4 * length * 6)


@pytest.mark.parametrize(("length", "keys"), [(a, b) for a in range(1, 7) for b in range(1, 7)])
def test_causal_rectangles(length: int, keys: int) -> None:
    ones = torch.ones(length, keys)
    assert pairs(length, keys, True) == int(ones.tril().sum())
    assert pairs(length, keys, False) == length * keys


def test_a_mask_is_read() -> None:
    q = dense((1, 2, 3, 4), F32)
    assert (
        attention(q, q, q, dense((3, 3), F32), False).min_bytes
        == attention(q, q, q, None, False).min_bytes + 36
    )


def test_what_is_broadcast_is_read_once() -> None:
    wide = torch.ones(8, device="meta").expand(4, 8)
    assert nbytes(wide) == 32
    cost = cost_of("aten::add", [dense((4, 8), F32), wide])
    assert cost is not None
    assert cost.min_bytes == 4 * 32 + 32 + 4 * 32


def test_masks_joined_by_a_sign_cost_what_the_operator_does() -> None:
    masks = [dense((4, 8), torch.bool)] * 2
    for sign in ("__and__", "__or__", "__xor__", "__iand__", "__ior__", "bitwise_or"):
        cost = cost_of(f"aten::{sign}", masks)
        assert cost is not None, sign
        assert (cost.flops, cost.min_bytes) == (32, 3 * 32)


def test_copies_move_what_they_read_and_write() -> None:
    source = dense((4, 8), F32)
    assert cost_of("aten::_to_copy", [source, 15]).min_bytes == 4 * 32 + 2 * 32  # type: ignore[union-attr]
    assert cost_of("aten::copy_", [dense((4, 8), BF16), source]).min_bytes == 6 * 32  # type: ignore[union-attr]
    assert cost_of("aten::cat", [[source, source], 0]).min_bytes == 4 * 4 * 32  # type: ignore[union-attr]


def test_an_embedding_reads_the_rows_it_needs() -> None:
    cost = cost_of("aten::embedding", [dense((1000, 8), F32), dense((3,), I64)])
    assert cost is not None
    assert cost.min_bytes == 2 * 3 * 8 * 4 + 3 * 8


def test_what_does_not_fit_has_no_cost() -> None:
    assert cost_of("aten::mm", [dense((3, 4), F32), dense((5, 6), F32)]) is None
    assert cost_of("aten::mm", []) is None
    assert cost_of("aten::an_operator_of_tomorrow", [dense((3,), F32)]) is None


def test_names_have_classes() -> None:
    assert kind_of("aten::addmm") == "MatMul"
    assert kind_of("aten::_softmax_backward_data") == "Softmax"
    assert kind_of("aten::add_") == "Other"
    assert kind_of("aten::view") == "Framework"
    assert kind_of("aten::an_operator_of_tomorrow") is None
    assert kind_of("opsmith::rms_norm_backward") == "Norm"
    assert card_of("opsmith::attention").name == "attention"  # type: ignore[union-attr]
    assert bare("aten::native_layer_norm_backward") == "native_layer_norm"


def test_an_empty_tensor_costs_nothing() -> None:
    assert nbytes(dense((0, 4), F32)) == 0
