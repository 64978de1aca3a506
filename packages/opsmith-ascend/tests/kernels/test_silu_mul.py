"""silu_mul in Ascend C, emulated."""

import pytest
import torch
from held_to_cards import check, check_samples

from opsmith.operator import Make, Sample, registry
from opsmith_ascend.launches import silu_mul as launch

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@DTYPES
def test_every_sample_of_the_card(dtype: torch.dtype) -> None:
    check_samples("silu_mul", launch, dtype)


@pytest.mark.parametrize("cores", [1, 2, 47, 48])
def test_any_number_of_cores_and_traffic_of_one_pass(cores: int) -> None:
    make = Make(torch.bfloat16)
    for sample in (
        Sample("two tensors", (make(3, 9001), make(3, 9001))),
        Sample("packed rows", (make(50, 1026),)),
        Sample("packed, a row is longer than a tile", (make(2, 50_002),)),
    ):
        done = check("silu_mul", sample, launch(*sample.args), cores)
        assert done is not None
        assert done.blocks <= cores
        assert done.traffic == registry()["silu_mul"].cost(*sample.args).min_bytes
