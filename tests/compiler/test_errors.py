"""What `optimize` can't take is one clear error, and the model is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler import Config
from tests.compiler.models import UNTIMED, WIDTH, Encoder, Feed, Truth, bert, ids, numbers, seeded


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _untouched(model: nn.Module, before: dict[str, Any], *inputs: Any) -> None:
    assert set(vars(model)) - {"_compiled_call_impl"} == set(before) - {"_compiled_call_impl"}
    assert model._compiled_call_impl is None
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.no_grad():
        Truth(model).check(model(*inputs), *inputs)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (numbers(3, 4, WIDTH + 1), "mat1 and mat2|size mismatch|shapes cannot be multiplied"),
        (ids(2, 3), "dtype|Float|Long"),
        ({"unknown": numbers(3, 4, WIDTH)}, "unexpected keyword argument 'unknown'"),
        ((), "missing 1 required positional argument"),
        ((numbers(3, 4, WIDTH), numbers(3)), "takes 2 positional arguments but 3 were given"),
    ],
    ids=["width", "dtype", "name", "none", "many"],
)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_inputs_that_the_model_refuses(example: Any, message: str, dtype: str | None) -> None:
    model = seeded(Feed)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=f"the model does not accept the example inputs: .*({message})") as e:
        opsmith.optimize(model, example, config=UNTIMED, dtype=dtype)
    assert "\n" not in str(e.value)
    _untouched(model, before, numbers(3, 4, WIDTH))


def test_the_second_example_may_be_the_wrong_one() -> None:
    model = seeded(lambda: Encoder(layers=1))
    before = dict(vars(model))
    with pytest.raises(
        ValueError, match="does not accept the example inputs: IndexError: index out of range"
    ):
        opsmith.optimize(model, [ids(2, 5), ids(2, 5) + 1000], config=UNTIMED)
    _untouched(model, before, ids(2, 5))


def test_a_hugging_face_model_without_its_inputs() -> None:
    model = seeded(bert)
    with pytest.raises(ValueError, match="does not accept the example inputs: ValueError: You must specify"):
        opsmith.optimize(model, {"attention_mask": torch.ones(2, 5)}, config=UNTIMED)
    assert not hasattr(model, "opsmith")


def test_inputs_in_another_dtype_than_the_model_will_have() -> None:
    model = seeded(Feed)
    before = dict(vars(model))
    with pytest.raises(
        ValueError, match=r"in bfloat16 the model does not accept .*RuntimeError: mat1.*; cast them"
    ):
        opsmith.optimize(model, numbers(3, 4, WIDTH), config=UNTIMED, dtype="bfloat16")
    _untouched(model, before, numbers(3, 4, WIDTH))


def test_what_is_no_model_no_config_no_example() -> None:
    with pytest.raises(TypeError, match=r"optimize: model must be a torch\.nn\.Module, got function"):
        opsmith.optimize(lambda x: x)  # type: ignore[arg-type]
    model = seeded(Feed)
    with pytest.raises(
        ValueError, match="quantize must be one of bf16, int8, int8_dynamic, int4, got 'int3'"
    ):
        opsmith.optimize(model, quantize="int3")
    with pytest.raises(TypeError, match=r"config must be an opsmith.Config or a path, got dict"):
        opsmith.optimize(model, config={"dtype": "bfloat16"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got int8"):
        opsmith.optimize(model, dtype="int8")
    with pytest.raises(ValueError, match=r"dtype must be one of .* got torch\.float64"):
        opsmith.optimize(model, dtype=torch.float64)
    with pytest.raises(
        TypeError, match=r"example_inputs must be a tensor, a tuple, a dictionary, .* got str"
    ):
        opsmith.optimize(model, "a sentence")
    with pytest.raises(ValueError, match=r"config: .*nowhere\.toml can't be read"):
        opsmith.optimize(model, config="nowhere.toml")
    with pytest.raises(ValueError, match=r"plan: can't read .*nowhere\.json"):
        opsmith.optimize(model, plan=Path("nowhere.json"))
    with pytest.raises(TypeError, match=r"plan must be an opsmith.Plan or a path, got dict"):
        opsmith.optimize(model, plan={"schema": 1})  # type: ignore[arg-type]
    assert not hasattr(model, "opsmith")


def test_an_optimized_model_survives_a_failed_second_attempt() -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    opsmith.optimize(model, x, config=UNTIMED)
    session = model.opsmith
    with pytest.raises(ValueError, match="no implementation"):
        opsmith.optimize(model, x, config=Config(pin={"linear": "nothing"}))
    assert model.opsmith is session


def test_a_device_that_is_not_there() -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    before = dict(vars(model))
    with pytest.raises((ValueError, RuntimeError), match=r"nodevice|device"):
        opsmith.optimize(model, x, config=Config(device="nodevice", tune=False))
    _untouched(model, before, x)


class _Choosy(nn.Module):
    """Raises at some calls, whatever runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = Feed()

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        if fail:
            raise KeyError("asked to fail")
        y: torch.Tensor = self.feed(x)
        return y


def test_errors_of_the_model_at_a_call_are_its_own() -> None:
    model, x = seeded(_Choosy), numbers(3, 4, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, x, config=UNTIMED)
    with torch.no_grad():
        with pytest.raises(KeyError, match="asked to fail"):
            model(x, fail=True)
        with pytest.raises((RuntimeError, ValueError), match=r"mat1|size|shape"):
            model(numbers(3, 4, WIDTH + 1))
        truth.check(model(x), x)


def test_a_model_of_which_nothing_is_captured_says_why() -> None:
    """The first words of PyTorch's own reason, the second time too; the model is as it was."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.turn(x)[0]  # type: ignore[no-any-return]

    model, x = Recurrent().eval(), torch.randn(1, 3, 8)
    right = model(x)
    for _ in range(2):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=r"no graph of this model, which is as it was: .*RNN"):
            opsmith.optimize(model, x)
        assert not hasattr(model, "opsmith")
        assert model(x).equal(right)
