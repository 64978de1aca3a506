"""What is particular to embedding: ids outside the table, padding, sparse gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from opsmith.call.dispatch import SMALL, small_up_to
from opsmith.ops import embedding
from opsmith.ops.embedding import IdError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "pytorch"])
@pytest.mark.parametrize("bad", [-1, 10, 2**40, -(2**40)])
def test_an_id_outside_the_table_is_named_with_its_position(dtype: torch.dtype, bad: int) -> None:
    ids = torch.tensor([[1, 2, 3], [4, bad, -7]])
    message = rf"embedding: ids must be in \[0, 10\) .* 10 rows, got {bad} at position \(1, 1\); check the tokenizer"
    with pytest.raises(IdError, match=message) as raised:
        embedding(ids, torch.randn(10, 6, dtype=dtype))
    assert isinstance(raised.value, IndexError)
    assert isinstance(raised.value, ValueError)


def test_the_position_in_a_vector_is_a_number() -> None:
    with pytest.raises(IdError, match="got 10 at position 2;"):
        embedding(torch.tensor([0, 1, 10]), torch.randn(10, 6))


def test_training_refuses_bad_ids_too() -> None:
    with pytest.raises(IdError, match="got 10 at position 0"):
        embedding(torch.tensor([10]), torch.randn(10, 6, requires_grad=True))


def test_an_empty_table_has_no_id() -> None:
    assert embedding(torch.empty(0, dtype=torch.long), torch.empty(0, 4)).shape == (0, 4)
    with pytest.raises(IdError, match=r"in \[0, 0\)"):
        embedding(torch.tensor([0]), torch.empty(0, 4))


@pytest.mark.parametrize("padding_idx", [None, 1, -3])
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_dense_and_sparse(padding_idx: int | None, sparse: bool) -> None:
    ids, table = torch.tensor([[0, 1, 1], [3, 1, 0]]), torch.randn(4, 5)
    grads = []
    for fn, names in ((embedding, "sparse_grad"), (torch.nn.functional.embedding, "sparse")):
        leaf = table.clone().requires_grad_()
        y = fn(ids, leaf, padding_idx=padding_idx, **{names: sparse})
        (y * torch.arange(30.0).view(2, 3, 5)).sum().backward()
        grads.append(leaf.grad)
    assert grads[0].is_sparse is sparse
    assert torch.equal(grads[0].to_dense(), grads[1].to_dense())


def test_many_equal_ids_are_summed_in_float32() -> None:
    table = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    embedding(torch.zeros(1000, dtype=torch.long), table).backward(torch.ones(1000, 3, dtype=torch.bfloat16))
    assert torch.equal(table.grad[0], torch.full((3,), 1000.0).bfloat16())  # a sum in bfloat16 stops at 256


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda ids, t: embedding([1], t), TypeError, "ids must be a tensor, got list"),
        (
            lambda ids, t: embedding(ids.float(), t),
            TypeError,
            "ids must be int64 or int32, got float32; cast them",
        ),
        (
            lambda ids, t: embedding(ids, t.long()),
            TypeError,
            "table must be a floating-point tensor, got int64",
        ),
        (lambda ids, t: embedding(ids, t[0]), ValueError, r"table must have shape \[V, N\], got \(4,\)"),
        (lambda ids, t: embedding(ids, t.to("meta")), ValueError, "ids are on cpu, table on meta; move one"),
        (
            lambda ids, t: embedding(ids, t, padding_idx=9),
            ValueError,
            r"padding_idx must be in \[-9, 9\), got 9",
        ),
        (lambda ids, t: embedding(ids, t, out=t), ValueError, r"out must be float32 \(3, 4\)"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(call, error, message) -> None:
    with pytest.raises(error, match=f"embedding: {message}"):
        call(torch.tensor([1, 2, 3]), torch.randn(9, 4))


@pytest.mark.parametrize("call", [[torch.tensor([1, 10])], [torch.tensor([[0], [-1]])]])
def test_a_small_call_names_the_id_too(call: list[torch.Tensor]) -> None:
    with small_up_to(SMALL):
        with pytest.raises(IdError, match=r"ids must be in \[0, 10\)"):
            embedding(*call, torch.randn(10, 6))
        with pytest.raises(TypeError, match="embedding: ids must be int64 or int32, got float32"):
            embedding(torch.tensor([1.0]), torch.randn(10, 6))
        with pytest.raises(ValueError, match=r"embedding: table must have shape \[V, N\], got \(10,\)"):
            embedding(torch.tensor([1]), torch.randn(10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_tables_gradient_is_zero_where_no_id_points(dtype: torch.dtype) -> None:
    """Memory for so large a gradient comes from the system, zero already, and most of it stays untouched."""
    table = torch.zeros(40_000, 512, dtype=dtype, requires_grad=True)
    ids = torch.randint(0, 40_000, (300,))
    embedding(ids, table, padding_idx=int(ids[0])).backward(torch.ones(300, 512, dtype=dtype))
    expected = torch.bincount(ids, minlength=40_000).to(dtype)
    expected[ids[0]] = 0
    assert table.grad.dtype == dtype
    assert torch.equal(table.grad, expected[:, None].expand(-1, 512))


VALUES = [0.0, -0.0, 1e-40, 1.5, -3e38, math.inf, -math.inf, math.nan]


@given(
    shape=st.lists(st.integers(0, 6), max_size=3),
    rows=st.integers(1, 30),
    width=st.integers(0, 70),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    special=st.lists(st.sampled_from(VALUES), max_size=4),
    layout=st.sampled_from(["contiguous", "columns", "transposed"]),
    padding=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape_any_value(shape, rows, width, id_dtype, dtype, special, layout, padding, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, 2 * width, generator=generator).to(dtype)[:, :width]
    if table.numel():
        table[:, : len(special)] = torch.tensor(special, dtype=dtype)[:width]
    if layout == "contiguous":
        table = table.contiguous()
    elif layout == "transposed":
        table = table.t().contiguous().t()
    ids = torch.randint(0, rows, shape, generator=generator).to(id_dtype)
    dy = torch.randint(-8, 9, (*shape, width), generator=generator).to(dtype)
    leaves = [table.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
    padding_idx = rows - 1 if padding else None
    y = embedding(ids, leaves[0], padding_idx=padding_idx)
    expected = torch.nn.functional.embedding(ids, leaves[1].double(), padding_idx=padding_idx)
    # Copies: bit for bit, the sign of zero included, apart from which NaN it is.
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(9.0), expected.to(dtype).nan_to_num(9.0))
    y.backward(dy)
    expected.backward(dy.double())
    # Small whole numbers: their sums are exact in every dtype.
    assert torch.equal(leaves[0].grad, leaves[1].grad)
