"""softmax in Ascend C, emulated."""

import pytest
import torch
from held_to_cards import check, check_samples

from opsmith.operator import Make, Sample, registry
from opsmith_ascend.launches import softmax as launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_sample_of_the_card(dtype: torch.dtype) -> None:
    check_samples("softmax", launch, dtype, skip=["first dimension"])


@pytest.mark.parametrize("cores", [1, 2, 47, 48])
def test_any_number_of_cores_and_traffic_of_one_pass(cores: int) -> None:
    make = Make(torch.bfloat16)
    for sample in (
        Sample("short rows", (make(97, 300),)),
        Sample("attention", (make(2, 3, 40, 1030),), {"scale": 0.1, "causal": True}),
        Sample("long rows that fit", (make(3, 15_000),)),
        Sample("a mask for each row", (make(2, 3, 9, 130),), {"mask": make(2, 3, 9, 130)}),
    ):
        done = check("softmax", sample, launch(*sample.args, **sample.kwargs), cores)
        assert done is not None
        assert done.blocks <= cores
        assert done.traffic == registry()["softmax"].cost(*sample.args, **sample.kwargs).min_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_longer_than_local_memory(dtype: torch.dtype) -> None:
    """They are read twice: maximum and sum online, then the result."""
    make = Make(dtype)
    x = make(3, 50_001, scale=5.0)
    x[1] += torch.linspace(-300, 300, 50_001).to(dtype)  # every piece has a new maximum
    mask = make.mask(3, 50_001)
    mask[0, :30_000] = False  # pieces of which nothing is left
    mask[2] = False  # and a row
    for options in ({}, {"causal": True}, {"mask": mask}):
        sample = Sample(f"long rows {list(options)}", (x,), options)
        done = check("softmax", sample, launch(x, **options), 2)
        assert done is not None
        masked = 2 * x.nbytes if "mask" in options else 0
        assert done.traffic == 3 * x.nbytes + masked


def test_fast_leaves_the_maximum_out() -> None:
    make = Make(torch.float32)
    for shape in ((4, 130), (1, 50_001)):
        x = make(*shape)
        done = {
            m: check("softmax", Sample(m, (x,)), launch(x, method=m), 1) for m in ("fast", "stable", "auto")
        }
        instructions = {m: d.pipes["V"] for m, d in done.items() if d is not None}
        assert instructions["fast"] < instructions["stable"] == instructions["auto"]
