"""What a public function may do wrong with its `out=`: each was planted, and must be named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.proof.test_verify import card, double_plus_one

from opsmith.call.arguments import check_out
from opsmith.operator import Implementation, registry
from opsmith.proof.outs import outs

X = torch.Tensor


def checked(x: X, *, out: X | None = None) -> X:
    """An operator that does everything right."""
    if out is not None:
        check_out("double_plus_one", out, x, x=x)
    return double_plus_one(x, out=out)


def another_object(x: X, *, out: X | None = None) -> X:
    y = checked(x, out=out)
    return y if out is None else y.clone()


def an_input_is_scratch(x: X, *, out: X | None = None) -> X:
    y = checked(x, out=out)
    if out is not None:
        x.zero_()
    return y


def anything_goes(x: X, *, out: X | None = None) -> X:
    return double_plus_one(x) if out is None else out.resize_(x.shape).copy_(double_plus_one(x))


def overlap_goes(x: X, *, out: X | None = None) -> X:
    if out is not None:
        check_out("double_plus_one", out, x)
    return double_plus_one(x, out=out)


def writes_first(x: X, *, out: X | None = None) -> X:
    if out is not None and isinstance(out, torch.Tensor):
        out.fill_(1)
    return checked(x, out=out)


def test_a_right_function_passes() -> None:
    findings = list(outs(card(checked, function=checked, out=True), torch.float32))
    assert {f.check for f in findings} == {"out=, returned", "out=, refused"}
    assert [f for f in findings if not f.ok] == []


@pytest.mark.parametrize(
    ("function", "check", "why"),
    [
        (another_object, "out=, returned", "is not the tensor that out= gave"),
        (an_input_is_scratch, "out=, returned", "an input is written to"),
        (anything_goes, "out=, refused", "another dtype is taken"),
        (overlap_goes, "out=, refused", "a part of input 0 of its dtype is taken"),
        (writes_first, "out=, refused", "written to before it is refused"),
    ],
)
def test_a_planted_fault_is_named(function: Callable[..., Any], check: str, why: str) -> None:
    found = [f for f in outs(card(function, function=function, out=True), torch.float32) if not f.ok]
    assert any(f.check == check and why in f.why for f in found), found


def test_an_operator_without_out_has_none_of_these_checks() -> None:
    gelu = registry()["gelu"]
    without = replace(gelu, implementations=[Implementation("eager", gelu.eager)])
    assert list(outs(without, torch.float32)) == []
