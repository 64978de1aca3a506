"""The gather of int8 rows in Ascend C, emulated."""

import pytest
import torch
from held_to_cards import check, check_samples

from opsmith.operator import Make, Sample, registry
from opsmith_ascend.launches import quantized_embedding as launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_sample_of_the_card(dtype: torch.dtype) -> None:
    check_samples("quantized_embedding", launch, dtype)


@pytest.mark.parametrize("cores", [1, 7, 48])
def test_any_number_of_cores_and_traffic_of_one_pass(cores: int) -> None:
    make, to = Make(torch.bfloat16), {"dtype": torch.bfloat16}
    table = (make.ids(50, 512, high=255) - 127).to(torch.int8)
    wide = (make.ids(3, 40_001, high=255) - 127).to(torch.int8)
    for sample in (
        Sample("rows of a model", (make.ids(700, high=50), table, make(50).float()), to),
        Sample("a row is longer than a tile", (make.ids(5, high=3), wide, make(3).float()), to),
    ):
        done = check("quantized_embedding", sample, launch(*sample.args, **sample.kwargs), cores)
        assert done is not None
        assert done.blocks <= cores
        least = registry()["quantized_embedding"].cost(*sample.args, **sample.kwargs).min_bytes
        assert least <= done.traffic <= 1.05 * least


def test_an_id_outside_the_table_is_refused() -> None:
    table = torch.ones(4, 32, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"\[0, 4\)"):
        launch(torch.tensor([1, 4]), table, torch.ones(4))
