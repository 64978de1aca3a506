"""What packed formats take from a real decoder: Gemma 3 270M, on the beginning of this project's license."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import opsmith
from opsmith.compiler.modules.quantize import Packing
from tests.gemma import gemma, gemma_folder  # noqa: F401

TEXT = (Path(__file__).parents[1] / "LICENSE").read_text()[:1800]


class Beside:
    """A model beside one that is packed in turns: both on the same weights."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        import copy

        self.original, self.tokenizer = model, tokenizer
        self.packed = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})

    def take(self, **fields: Any) -> opsmith.Evaluation:
        packing = Packing()
        packing.pack(self.packed, opsmith.Config(**fields))
        assert {layer.status for layer in packing.layers} == {"packed"}
        options: dict[str, Any] = {"window": 256, "tokenizer": self.tokenizer}
        found = opsmith.evaluate(self.packed, TEXT, against=self.original, **options)
        packing.take_out()
        return found


def test_eight_bits_keep_the_quality_and_four_lose_some(gemma: tuple[Any, Any]) -> None:  # noqa: F811
    model = Beside(*gemma)
    eight, four = model.take(quantize="int8"), model.take(quantize="int4")
    assert eight.predictions > 300
    assert eight.perplexity < 20  # without what every text begins with it is three times as high
    assert eight.ratio is not None
    assert eight.kl is not None
    assert eight.agreement is not None
    assert 0.98 < eight.ratio < 1.02
    assert eight.kl < 0.02
    assert eight.agreement > 0.93
    assert four.kl is not None
    assert 0.05 < four.kl < 1  # what docs/guide/quality.md says of four bits
