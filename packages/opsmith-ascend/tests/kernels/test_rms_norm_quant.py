"""rms_norm_quant in Ascend C, emulated."""

import pytest
import torch
from held_to_cards import check, check_samples

from opsmith.operator import Make, Sample, registry
from opsmith_ascend.launches import rms_norm_quant as launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_sample_of_the_card(dtype: torch.dtype) -> None:
    check_samples("rms_norm_quant", launch, dtype)


@pytest.mark.parametrize("cores", [1, 2, 48])
def test_any_number_of_cores_and_traffic_of_one_pass(cores: int) -> None:
    make = Make(torch.bfloat16)
    for sample in (
        Sample("rows of a model", (make(3, 7168), make(7168))),
        Sample("many short rows", (make(500, 48), make(48))),
        Sample("float32 weight", (make(61, 512), make(512).float()), {"scale": 0.02, "offset": 3.0}),
    ):
        done = check("rms_norm_quant", sample, launch(*sample.args, **sample.kwargs), cores)
        assert done is not None
        assert done.blocks <= cores
        weight = sample.args[1].nbytes
        least = registry()["rms_norm_quant"].cost(*sample.args, **sample.kwargs).min_bytes
        scales = 8 * done.blocks if sample.kwargs else 0
        assert done.traffic == least + (done.blocks - 1) * weight + scales  # each core reads the weight once


def test_a_row_that_local_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks, got 0"):
        launch(torch.randn(2, 20_000), torch.ones(20_000)).emulated()
