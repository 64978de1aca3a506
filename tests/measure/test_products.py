"""Products in dtypes without a unit: how slow they are is measured, said, and avoided where nothing is timed."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opsmith import measure
from opsmith.measure import products
from opsmith.measure.roofs import RoofProbes


@pytest.fixture(params=[1.0, 34.0])
def slowness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(products, "slowness", lambda dtype: request.param if dtype == torch.bfloat16 else 1.0)
    return request.param


class Multiplied(TorchDispatchMode):
    """The dtypes in which products are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in products._PRODUCTS:
            self.dtypes.append(args[0].dtype if func is not torch.ops.aten.addmm.default else args[1].dtype)
        return func(*args, **(kwargs or {}))


def test_slowness_is_measured_once_and_of_float32_it_is_one() -> None:
    assert measure.slowness(torch.float32) == measure.slowness(torch.int8) == 1.0
    assert measure.slowness(torch.bfloat16) > 0
    assert measure.slowness(torch.bfloat16) == measure.slowness(torch.bfloat16)


def test_what_has_no_unit_is_said(slowness: float) -> None:
    said = measure.without_unit(torch.bfloat16)
    assert said == (
        "this processor has no unit for products in bfloat16: PyTorch takes 34 times as long as in float32"
        if slowness > 4
        else ""
    )
    assert measure.without_unit(torch.float32) == ""


def test_products_are_widened_and_rounded_once(slowness: float) -> None:
    a, b = torch.randn(5, 40).bfloat16(), torch.randn(40, 7).bfloat16()
    bias = torch.randn(7).bfloat16()
    with Multiplied() as multiplied, measure.Widened():
        got = torch.nn.functional.linear(a, b.t(), bias), a @ b, torch.bmm(a[None], b[None])[0]
    assert {t.dtype for t in got} == {torch.bfloat16}
    assert multiplied.dtypes == [torch.float32 if slowness > 4 else torch.bfloat16] * 3
    if slowness > 4:
        exact = torch.addmm(bias.float(), a.float(), b.float())
        assert torch.equal(got[0], exact.bfloat16())
        assert torch.equal(got[1], (a.float() @ b.float()).bfloat16())
        assert torch.equal(got[2], got[1])
    q = torch.randn(1, 2, 6, 8).bfloat16()
    with Multiplied() as multiplied, measure.Widened():
        seen = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    wide = torch.nn.functional.scaled_dot_product_attention(q.float(), q.float(), q.float())
    assert multiplied.dtypes == [torch.float32 if slowness > 4 else torch.bfloat16]
    torch.testing.assert_close(seen.float(), wide, atol=0.02, rtol=0.02)


def test_other_dtypes_stay_as_they_are(slowness: float) -> None:
    a = torch.randn(4, 4)
    with measure.Widened():
        assert torch.equal(a @ a, torch.mm(a, a))
        assert (a.half() @ a.half()).dtype == torch.float16


def test_the_roof_of_a_product_is_that_of_what_it_can_be_widened_to(slowness: float) -> None:
    results = [probe() for probe in RoofProbes(("matmul bfloat16",), sizes=(16,)).contestants().values()]
    assert results
    assert {r.dtype for r in results} == {torch.float32 if slowness > 4 else torch.bfloat16}
