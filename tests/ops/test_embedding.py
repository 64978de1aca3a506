"""What is particular to embedding: ids outside the table, padding, sparse gradients."""

from __future__ import annotations

import pytest
import torch

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
