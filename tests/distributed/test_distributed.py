"""Tensors that are spread over two ranks: results, gradients, bytes and refusals, from one pair of processes."""

from __future__ import annotations

from typing import Any

import pytest

from opsmith.kernels import libraries
from tests.distributed import losses, operators, processes

pytestmark = pytest.mark.skipif(not libraries.load("cross_entropy_part"), reason="there are no kernels here")


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    checks: dict[str, processes.Check] = {
        "classes": losses.over_classes,
        "loss rows": losses.over_rows,
        "bytes": losses.exchanged,
        "rows": operators.over_rows,
        "refused": operators.refused,
    }
    both = processes.run(checks)
    for name, ranks in both.items():
        for rank, got in enumerate(ranks):
            assert not isinstance(got, str), f"{name} on rank {rank}:\n{got}"
    return both


def test_a_loss_of_spread_classes_or_rows_and_its_gradients_are_those_of_one_process(
    found: dict[str, list[Any]],
) -> None:
    assert found["classes"][0] == found["classes"][1]
    assert len(found["classes"][0]) == 2 * 2 * len(losses.CLASSES) * len(losses.WAYS)
    assert found["loss rows"][0].keys() == losses.WAYS.keys()
    for case, tensors in (found["classes"][0] | found["loss rows"][0]).items():
        for error, alone, unit in tensors:
            # The operators' own policy: twice the error of what it is compared with, and four units.
            assert error <= 2 * alone + 4 * unit, (case, error, alone, unit)


def test_a_loss_exchanges_twelve_bytes_a_row_and_the_gradient_of_hidden(found: dict[str, list[Any]]) -> None:
    for got in found["bytes"]:
        rows, hidden = got["rows"], got["hidden"]
        assert got["mean"] == [(2, 12 * rows), (1, hidden)]
        assert got["smoothed"] == [(2, 16 * rows), (1, hidden)]


def test_operators_compute_with_their_parts_and_exchange_nothing(found: dict[str, list[Any]]) -> None:
    for got in found["rows"]:
        assert got.keys() == operators.CASES.keys()
        for name, one in got.items():
            assert one["placed"] == str(operators.CASES[name].result), name
            assert one["far"] <= 4e-6, (name, one["far"])  # float32 sums of 16 or 64 numbers, reordered
            assert one["bytes"] == 0, name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a norm's numbers",
            "x [... N] may be spread over ranks only along ... here, got S(1); redistribute",
        ),
        ("tokens", "x [B H L D] may be spread over ranks only along B, H here, got S(2); redistribute"),
        ("causal rows", "x [... N] may be spread over ranks along nothing here, got S(0); redistribute"),
        ("halves", "gate [... I] may be spread over ranks only along ... here, got S(1); redistribute"),
        ("heads", "k has 3 of H, q 6: both must be a multiple of the 2 ranks"),
        ("out", "out must be None where tensors are spread over ranks"),
        ("a packed sum", "x [... K] may be spread over ranks only along ... here, got S(1); redistribute"),
        ("a packed sum in order", "x [... K] may be spread over ranks only along ... here, got S(1)"),
        ("experts", "logits [... E] may be spread over ranks only along ... here, got S(1)"),
        ("a table's rows", "table [V N] may be spread over ranks only along ... here, got S(0)"),
        ("a sum", "x [... K] may be spread over ranks only along ..., N here, got S(1)"),
        ("two ways", "weight [N K] may be spread over ranks only along ...1 here, got S(0)"),
        ("float64", "not float64; classes that are spread over ranks need one"),
        ("a class", "targets must be in [0, 16) or ignore_index=-100, got 16 at position 1"),
    ],
)
def test_what_has_no_rule_is_refused_with_the_next_step(
    found: dict[str, list[Any]], name: str, message: str
) -> None:
    for got in found["refused"]:
        assert message in got[name]
