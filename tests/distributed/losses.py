"""Losses whose classes are spread over ranks, beside those of one process: what each rank finds."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from opsmith.call.dispatch import always_native
from opsmith.ops import cross_entropy, linear_cross_entropy

Tensor = torch.Tensor
WAYS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.2, "z_loss": 1e-3},
    "smoothed none": {"label_smoothing": 0.2, "z_loss": 1e-3, "reduction": "none"},
}
CLASSES = (1, 7, 2101)  # of 1, the second rank has none


def made(classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias and target; some targets are ignored."""
    hidden, weight = torch.randn(3, 13, 48), torch.randn(classes, 48) * 0.4
    target = torch.randint(0, classes, (3, 13)).masked_fill_(torch.rand(3, 13) < 0.3, -100)
    bias = torch.randn(classes)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), target


def results(call: Any, leaves: list[Tensor], dloss: Tensor | None) -> list[Tensor]:
    """The loss and the gradients, as one process has them."""
    for leaf in leaves:
        leaf.requires_grad_()
    loss = call(*leaves)
    loss.backward(torch.ones_like(loss) if dloss is None else dloss)
    found = [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in found]


def apart(got: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> list[tuple[float, float, float]]:
    """Of each: the error, that of one process, and the unit of its dtype at its magnitude."""
    assert len(got) == len(eager) == len(exact)
    return [
        (
            float((a.double() - c).abs().max()),
            float((b.double() - c).abs().max()),
            torch.finfo(a.dtype).eps * float(c.abs().max()),
        )
        for a, b, c in zip(got, eager, exact, strict=True)
    ]


def over_classes(mesh: DeviceMesh) -> dict[str, Any]:
    """`linear_cross_entropy` and `cross_entropy`, forward and backward."""
    found = {}
    for classes in CLASSES:
        for dtype in (torch.float32, torch.bfloat16):
            for name, how in WAYS.items():
                hidden, weight, bias, target = made(classes, dtype)
                slope = torch.rand(3, 13).to(dtype) if how.get("reduction") == "none" else None

                def loss(h: Tensor, w: Tensor, b: Tensor, t: Any = target, how: Any = how) -> Tensor:
                    return linear_cross_entropy(h, w, t, bias=b, **how)

                def of_logits(x: Tensor, t: Any = target, how: Any = how) -> Tensor:
                    return cross_entropy(x, t, **how)

                spread = [hidden.clone(), *(distribute_tensor(t, mesh, [Shard(0)]) for t in (weight, bias))]
                whole = [hidden, weight, bias]
                wide = [t.double() for t in whole]
                logits = torch.nn.functional.linear(*whole)
                with always_native():
                    key = f"{classes} {name} {dtype}"
                    alone = results(loss, [t.clone() for t in whole], slope)
                    exact = results(loss, wide, None if slope is None else slope.double())
                    mine = slope if slope is None else DTensor.from_local(slope, mesh, [Replicate()])
                    found[key] = apart(results(loss, spread, mine), alone, exact)
                    parts = distribute_tensor(logits, mesh, [Shard(-1)])
                    exact = results(of_logits, [logits.double()], None if slope is None else slope.double())
                    alone = results(of_logits, [logits.clone()], slope)
                    found[f"logits {key}"] = apart(results(of_logits, [parts], mine), alone, exact)
    return found


def exchanged(mesh: DeviceMesh) -> dict[str, Any]:
    """Which collectives a loss takes, and the bytes that are given to them."""
    hidden, weight, _, target = made(2101, torch.float32)
    spread = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    found = {}
    for name in ("mean", "smoothed"):
        with Bytes() as forward:
            loss = linear_cross_entropy(hidden.requires_grad_(), spread, target, **WAYS[name])
        with Bytes() as backward:
            loss.backward()
        found[name] = [(sum(one.counted.values()), sum(one.sizes)) for one in (forward, backward)]
    found["rows"] = int((target != -100).sum())
    found["hidden"] = hidden.nbytes
    return found


class Bytes(CommDebugMode):
    """Counts collectives, and adds up the bytes that each is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    @property
    def counted(self) -> dict[str, int]:
        """How often each was called."""
        return {str(op): count for op, count in self.get_comm_counts().items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "reduce" in str(func):
            given = args[0] if isinstance(args[0], list) else [args[0]]
            self.sizes.append(sum(t.nbytes for t in given if type(t) is torch.Tensor))
        return super().__torch_dispatch__(func, types, args, kwargs)


def over_rows(mesh: DeviceMesh) -> dict[str, Any]:
    """The same of rows that are spread: a mean is over the rows of all ranks, which ignore other numbers of them."""
    found = {}
    for name, how in WAYS.items():
        hidden, weight, bias, target = made(600, torch.float32)
        slope = torch.rand(3, 13) if how.get("reduction") == "none" else None
        wide = None if slope is None else slope.double()

        def loss(h: Tensor, w: Tensor, b: Tensor, t: Any = target, how: Any = how) -> Tensor:
            return linear_cross_entropy(h, w, t, bias=b, **how)

        def of_parts(h: Tensor, w: Tensor, b: Tensor, t: Any = target, how: Any = how) -> Tensor:
            return linear_cross_entropy(h, w, distribute_tensor(t, mesh, [Shard(0)]), bias=b, **how)

        whole = [hidden, weight, bias]
        spread = [
            distribute_tensor(t, mesh, [p])
            for t, p in zip(whole, (Shard(0), Replicate(), Replicate()), strict=True)
        ]
        mine = slope if slope is None else DTensor.from_local(slope, mesh, [Replicate()])
        exact = results(loss, [t.double() for t in whole], wide)
        with always_native():
            alone = results(loss, [t.clone() for t in whole], slope)
            found[name] = apart(results(of_parts, spread, mine), alone, exact)
    return found
