"""What may happen to a model after it was optimized: each row of docs/guide/changes.md, in float32 and packed."""

from __future__ import annotations

import copy
import io
import re
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import opsmith
from opsmith.compiler.choose import weights
from opsmith.compiler.modules.adjacent import Adjacent
from tests.compiler.models import WIDTH, Feed, numbers, optimized, seeded

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "changes.md"


class Stack(nn.Module):
    """Two feed-forward layers, of which a method of the class and an attribute choose what is done between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Feed(), Feed()
        self.scale = 2.0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.between(self.first(x)))
        return y


@dataclass(frozen=True)
class Row:
    """A change, what calls the changed model, and whether its results are others than before."""

    change: Callable[[Any], Any]
    call: Callable[[Any, torch.Tensor], Any] = lambda model, x: model(x)
    other: bool = True


def filled(parameter: torch.Tensor, seed: int = 5) -> torch.Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) / 4


@torch.no_grad()
def loaded(model: Any) -> None:
    model.load_state_dict({name: filled(t) for name, t in model.state_dict().items()})


@torch.no_grad()
def in_place(model: Any) -> None:
    model.first.up.weight.mul_(2)
    model.second.down.bias.add_(1)


def stepped(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = filled(parameter)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def cast(model: Any) -> Any:
    return model.to(torch.bfloat16).to(torch.float32)


def untied(model: Any) -> None:
    model.first.up.weight = model.second.up.weight
    with torch.no_grad():
        model.second.up.weight.copy_(filled(model.second.up.weight))
    model.second.up.weight = nn.Parameter(filled(model.second.up.weight, 6))


def halved(model: Any) -> None:
    model.first.up, model.first.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
    loaded(model)


def pruned(model: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(model.first.up, "weight", 0.5)  # type: ignore[no-untyped-call]


def orthogonal(model: Any) -> None:
    torch.manual_seed(0)
    nn.utils.parametrizations.orthogonal(model.first.up)


def merged(model: Any) -> Any:
    lora(model)
    for module in model.modules():
        if hasattr(module, "merge"):
            module.merge()
    return model


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is in the extra dev")
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["up", "down"], r=4, init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model).eval()


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is in the extra dev")
    torch.manual_seed(3)
    model.config = types.SimpleNamespace(model_type="none", get=lambda *_: None, to_dict=dict)
    return peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["up", "down"], r=4, init_lora_weights=False)
    ).eval()


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def sharded(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_flat(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def exported(model: Any) -> Any:
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    return torch.export.export(model, (numbers(3, 4, WIDTH),), dynamic_shapes=(sizes,)).module()


class Negative(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return -super().forward(input)


def other_weights(model: Any, x: torch.Tensor) -> Any:
    return torch.func.functional_call(model, {n: filled(p) for n, p in model.named_parameters()}, (x,))


def bound(module: nn.Module, function: Callable[..., Any]) -> None:
    module.forward = types.MethodType(function, module)


ROWS: dict[str, Row] = {
    "`load_state_dict`": Row(loaded),
    "a change in place that PyTorch counts": Row(in_place),
    "a step of an optimizer": Row(stepped),
    "`weight.data = t`": Row(lambda m: setattr(m.first.up.weight, "data", filled(m.first.up.weight))),
    "another `nn.Parameter`": Row(
        lambda m: setattr(m.first.up, "weight", nn.Parameter(filled(m.first.up.weight)))
    ),
    "weights tied, untied": Row(untied),
    "`to(dtype)`": Row(cast, other=False),
    "`requires_grad_(False)`": Row(lambda m: m.requires_grad_(False), other=False),
    "a change that PyTorch does not count (`weight.data.mul_(2)`, a NumPy view)": Row(
        lambda m: m.first.up.weight.data.mul_(2)
    ),
    "layers of other sizes": Row(halved),
    "a parametrization": Row(orthogonal),
    "pruning": Row(pruned),
    "an attribute that the model reads": Row(lambda m: setattr(m, "scale", -1.0)),
    "another module in a module's place": Row(
        lambda m: (setattr(m, "second", nn.Linear(WIDTH, WIDTH)), loaded(m))[0]
    ),
    "another class of a module": Row(lambda m: setattr(m.first.up, "__class__", Negative)),
    "`module.forward = f`": Row(lambda m: bound(m.first, lambda self, x: self.norm(x))),
    "a hook of a module": Row(lambda m: m.first.up.register_forward_hook(lambda module, args, y: 2 * y)),
    "a hook of the model": Row(lambda m: m.register_forward_pre_hook(lambda module, args: (2 * args[0],))),
    "LoRA adapters (peft), injected": Row(lora),
    "LoRA adapters, merged": Row(merged),
    "LoRA adapters, a `PeftModel` around it": Row(adapted),
    "`copy.deepcopy`": Row(copy.deepcopy, other=False),
    "`pickle`, `torch.save`": Row(saved, other=False),
    "`torch.func.functional_call`": Row(lambda m: None, other_weights),
    "another module around it": Row(lambda m: nn.Sequential(m), other=False),
    "`torch.compile` around it": Row(
        lambda m: torch.compile(nn.Sequential(m), backend="aot_eager"), other=False
    ),
    "`torch.export`": Row(exported, other=False),
    "`DistributedDataParallel`": Row(lambda m: nn.parallel.DistributedDataParallel(m), other=False),
    "`fully_shard`": Row(sharded, other=False),
    "`FullyShardedDataParallel`": Row(sharded_flat, other=False),
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def changed(row: Row, model: Any) -> Any:
    new = row.change(model)
    return new if isinstance(new, nn.Module) else model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_a_change_is_followed(name: str, quantize: str | None) -> None:
    row, x = ROWS[name], numbers(3, 4, WIDTH)
    model, plain = optimized(seeded(Stack), x, quantize=quantize), seeded(Stack)
    for _ in range(3):
        before = model(x)
    model = changed(row, model)
    got = [row.call(model, x) for _ in range(2)]
    want = row.call(changed(row, plain), x)
    for y in got:
        if quantize is None:
            torch.testing.assert_close(y, want)
        else:  # a weight that is not followed is off by as much as the result itself
            assert (y - want).abs().max() < 0.05 * want.abs().max()
    assert torch.allclose(got[0], before, atol=0.05) is not row.other


def test_the_page_has_these_rows() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    assert [row for row in rows if row in ROWS] == list(ROWS)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_what_all_models_share_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = optimized(seeded(Stack), numbers(3, 4, WIDTH)), numbers(3, 4, WIDTH)
    before = model(x)
    for method in ("forward", "between"):  # one that calls the other
        with monkeypatch.context() as patch:
            patch.setattr(Stack, method, lambda self, x: self.second(x))
            torch.testing.assert_close(model(x), model._call_impl(x))
            assert not torch.allclose(model(x), before)
        torch.testing.assert_close(model(x), before)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(model(x), model._call_impl(x))
    hook.remove()
    torch.testing.assert_close(model(x), before)


@torch.no_grad()
def test_a_hook_is_said_once_and_captured_by_another_optimize() -> None:
    model, x = optimized(seeded(Stack), numbers(3, 4, WIDTH)), numbers(3, 4, WIDTH)
    seen: list[int] = []
    hook = model.first.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="a hook of a module was added or removed.*optimize it again"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    assert "in 2 calls a hook of a module was added" in str(model.opsmith.report)
    optimized(model, x)
    seen.clear()
    model(x)
    assert seen == [1]
    assert "a hook" not in str(model.opsmith.report)
    hook.remove()


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_part_of_a_quantized_model_follows_its_weights_when_called_alone() -> None:
    model, x = optimized(seeded(Stack), numbers(3, 4, WIDTH), quantize="int8"), numbers(3, 4, WIDTH)
    in_place(model)
    want = nn.functional.linear(x, model.first.up.weight, model.first.up.bias)
    assert (model.first.up(x) - want).abs().max() < 0.02 * want.abs().max()
    model.first.up.weight.data[0, 0] = float("nan")
    model.first.up.weight[0].mul_(1)
    torch.testing.assert_close(model.first.up(x), model.first.up._call_impl(x), equal_nan=True)
    assert model.first.up(x)[..., 0].isnan().all()
    assert not model.first.up(x)[..., 1:].isnan().any()
    assert "after a change: " in str(model.opsmith.report.details())


def test_packed_weights_that_should_learn_are_named() -> None:
    model, x = optimized(seeded(Stack), numbers(3, 4, WIDTH), quantize="int8"), numbers(3, 4, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        model.train()
        for layer in (model.first.up, model.first.down, model.second.up):
            layer.weight.requires_grad_(False)
        with torch.no_grad():
            model(x)
    with pytest.warns(UserWarning, match="the weights of 1 quantized layers get no gradient"):
        model(x).sum().backward()
    assert model.second.down.weight.grad is None
    assert model.second.norm.weight.grad is not None


@torch.no_grad()
def test_what_graphs_packed_is_not_taken_over_by_the_next_one() -> None:
    """Of a weight that changed without PyTorch's counting it, as a merged adapter's."""
    model, x = seeded(Stack), numbers(3, 4, WIDTH)
    opsmith.optimize(model, (x,), config=opsmith.Config(tune=False, pin={"linear": "onednn"}))
    for scale in (3.0, 2.0):
        model.scale = scale
        model(x)
    packed = {key[0] for key in weights._SHARED}
    assert {model.first.up.weight.data_ptr(), model.second.down.weight.data_ptr()} <= packed
    for scale in (3.0, 2.0):
        for layer in (model.first.up, model.second.down):
            layer.weight.data.mul_(1.5)
        model.scale = scale
        torch.testing.assert_close(model(x), model._call_impl(x))


class Gate(nn.Module):
    """Two layers of one input, whose weights lie side by side once nothing learns, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return y


class Gates(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gate(), Gate()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_may_be_sharded_before_its_first_call(frozen: bool) -> None:
    models, x = [seeded(Gates), seeded(Gates)], numbers(3, WIDTH)
    for model in models:
        model.first.requires_grad_(not frozen)
    opsmith.optimize(models[0])
    for model in map(sharded, models):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(*(model(x) for model in models))
    assert "could not be studied" not in str(models[0].opsmith.report)


@torch.no_grad()
def test_parts_may_be_spread_over_ranks_and_others_not() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    x, spread = numbers(3, WIDTH), {"0.down": parallel.ColwiseParallel()}
    model, plain = (nn.Sequential(seeded(Gate)) for _ in range(2))
    parallel.parallelize_module(model, init_device_mesh("cpu", (1,)), spread)
    torch.testing.assert_close(optimized(model, x)(x), plain(x))
    assert "could not be studied" not in str(model.opsmith.report)


def test_a_rank_that_fails_does_not_run_its_model_alone() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    model, calls = nn.Sequential(seeded(Gate)), mock.Mock(return_value=None)
    parallel.parallelize_module(model, init_device_mesh("cpu", (1,)), {"0.down": parallel.ColwiseParallel()})
    model.register_forward_pre_hook(calls)
    planted = mock.patch.object(Adjacent, "of", side_effect=MemoryError("planted"))
    with planted, pytest.raises(MemoryError, match="planted"):
        optimized(model, numbers(3, WIDTH))
    assert not calls.called  # other ranks may be elsewhere
    assert not hasattr(model, "opsmith")
