"""Calls whose tensors are spread over ranks (`DTensor`): each rank computes with its part, as the signature allows.

A signature's words say which tensors share a size, and a `Call`'s `apart` along which sizes results do not depend on
each other: the rows of a normalization, the heads of an attention. What one tensor is spread along, all are that have
this size; a tensor without it is the same on all ranks, and its gradient is a sum over them (`Partial`). Nothing is
gathered: what would have to be is refused. A plain tensor stands for one that all ranks have alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


class Spread:
    """How one call is spread: for each dimension of the mesh the size that it divides, or None."""

    def __init__(self, call: Any, values: Sequence[Any]) -> None:
        self.op, self._words, self._apart = call.op, call.sizes(values), call.apart(values)
        tensors = {n: v for n, v in zip(call.given, values, strict=False) if isinstance(v, Tensor)}
        spread = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
        self.mesh: DeviceMesh = next(iter(spread.values())).device_mesh
        self.divides: list[str | None] = [None] * self.mesh.ndim
        self._largest: dict[str, int] = {}  # of what has less, which is 1, all ranks have all
        for name, t in tensors.items():
            for word, size in zip(self._named(name, t.shape), t.shape, strict=True):
                self._largest[word] = max(size, self._largest.get(word, 0))
        for name, d in spread.items():
            if d.device_mesh != self.mesh:
                raise ValueError(f"{self.op}: {name} is on {d.device_mesh}, another tensor on {self.mesh}")
            for i, placement in enumerate(d.placements):
                if placement != Replicate():
                    self._divide(i, name, d, placement)
        for name, t in tensors.items():
            self._check(name, t, tensors)

    def _divide(self, i: int, name: str, t: Tensor, placement: Placement) -> None:
        """Have a dimension of the mesh divide what a tensor is spread along there."""
        along = self._named(name, t.shape)[placement.dim] if type(placement) is Shard else ""
        allowed = along in self._apart or ("..." in self._apart and along.startswith("..."))
        if not allowed or self.divides[i] not in (None, along):
            such = [*self._apart] if self.divides[i] is None else [self.divides[i]]
            words = f"only along {', '.join(map(str, such))} here" if such else "along nothing here"
            raise ValueError(
                f"{self.op}: {name} [{' '.join(map(str, self._words[name]))}] may be spread over ranks {words}, "
                f"got {placement}; redistribute it first, to Replicate() for instance"
            )
        self.divides[i] = along

    def _check(self, name: str, t: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Tensors that have a size in different numbers, as heads, are divided in the same places."""
        for i, along in enumerate(self.divides):
            at = self._at(name, t.shape, along)
            if at is None or t.shape[at] % self.mesh.size(i) == 0:
                continue
            for other, u in tensors.items():
                where = self._at(other, u.shape, along)
                if where is not None and u.shape[where] != t.shape[at]:
                    raise ValueError(
                        f"{self.op}: {name} has {t.shape[at]} of {along}, {other} {u.shape[where]}: both must be a "
                        f"multiple of the {self.mesh.size(i)} ranks; redistribute to Replicate() first"
                    )

    def _named(self, name: str, shape: Sequence[int]) -> list[str]:
        """A word for each dimension; of those before the named ones `...1` is the last."""
        words = [str(word) for word in self._words[name]]
        named = [word for word in words if word != "..."]
        before = len(shape) - len(named)
        if "..." in words:
            return [f"...{before - i}" for i in range(before)] + named
        return named[max(-before, 0) :]  # what broadcasts may have fewer

    def _at(self, name: str, shape: Sequence[int], along: str | None) -> int | None:
        """The dimension of a tensor that is divided; none where it broadcasts."""
        words = self._named(name, shape)
        at = words.index(along) if along in words else None
        return None if at is None or (shape[at] == 1 != self._largest.get(words[at])) else at

    def placements(self, name: str, shape: Sequence[int], otherwise: Placement) -> list[Placement]:
        """Of a tensor; `otherwise` is what it is where something else is divided."""
        found: list[Placement] = []
        for along in self.divides:
            at = self._at(name, shape, along)
            found.append(Replicate() if along is None else otherwise if at is None else Shard(at))
        return found

    def parts(self, call: Any, values: Sequence[Any]) -> list[Any]:
        """What this rank computes with; gradients come back as they belong."""
        found = []
        for name, t in zip(call.given, values, strict=False):
            if not isinstance(t, Tensor):
                found.append(t)
                continue
            if not isinstance(t, DTensor):
                t = DTensor.from_local(t, self.mesh, [Replicate()] * self.mesh.ndim)
            placed = t.redistribute(placements=self.placements(name, t.shape, Replicate()))  # a rank's slice
            found.append(placed.to_local(grad_placements=self.placements(name, t.shape, Partial())))
        return found

    def whole(self, name: str, part: Tensor, shape: Sequence[int]) -> DTensor:
        """The result that ranks have parts of."""
        return self.placed(part, shape, self.placements(name, shape, Replicate()))

    def placed(self, part: Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> DTensor:
        """The same, where its placements do not follow from its sizes."""
        lies = torch.empty(torch.Size(shape), device="meta").stride()
        return DTensor.from_local(part, self.mesh, placements, shape=torch.Size(shape), stride=lies)


def run(call: Any, values: Sequence[Any], out: Any) -> Any:
    """A call of the general way, on each rank with its part."""
    call.check(values)
    if out is not None:
        raise ValueError(f"{call.op}: out must be None where tensors are spread over ranks; copy the result")
    spread = Spread(call, values)
    results = call.traced(*spread.parts(call, values), None)
    parts = results if isinstance(results, tuple) else (results,)
    found = tuple(
        spread.whole(one.name, part, shape)
        for part, (one, shape, _) in zip(parts, call.made(values), strict=True)
    )
    return found if isinstance(results, tuple) else found[0]
