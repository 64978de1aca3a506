"""The ranks that a model is spread over: they choose alike, by the times of the slowest, or their values would part."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from opsmith.call.dispatch import is_sharded
from opsmith.compiler.reasons import one_line
from opsmith.kernels import isa
from opsmith.version import VERSION


class Ranks:
    """All processes that hold parts of one model. Each call here is made by all of them, in the same order."""

    def __init__(self, mesh: Any) -> None:
        self._groups = mesh.get_all_groups()
        self._device = mesh.device_type

    @classmethod
    def of(cls, model: nn.Module) -> Ranks | None:
        """Those of a model; None for one that this process has all of."""
        weights: Iterable[Any] = model.parameters()
        meshes = [w.device_mesh for w in weights if is_sharded(w)]  # of some dimensions, or of all
        return cls(max(meshes, key=lambda mesh: mesh.size())) if meshes else None

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, as JSON.

        Raises:
            RuntimeError: for ranks that do not answer.
        """
        values = [value]
        for group in self._groups:
            try:
                every = self._exchange(json.dumps(values).encode(), group)
            except RuntimeError as error:  # which names an address at best
                me = dist.get_rank()
                others = sorted({*dist.get_process_group_ranks(group)} - {me})
                raise RuntimeError(
                    f"optimize: rank {me} chooses together with {others}, and one of these is gone or waits "
                    f"elsewhere: see what it said, and start all of them again ({one_line(error)})"
                ) from error
            values = [v for each in every for v in json.loads(each)]
        return values

    def _exchange(self, text: bytes, group: Any) -> list[bytes]:
        size = dist.get_world_size(group)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(size)]
        dist.all_gather(lengths, torch.full_like(lengths[0], len(text)), group=group)
        most = max(map(int, lengths))
        mine = torch.frombuffer(bytearray(text.ljust(most)), dtype=torch.uint8).to(self._device)
        texts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(texts, mine, group=group)
        return [bytes(t.tolist()) for t in texts]

    def alike(self, able: dict[str, Any], *known: Any) -> tuple[Any, ...]:
        """What all can run, and a plan's choice and times if all have the same: other parts are other calls."""
        every = self.gather([[*able], *known])
        able = {name: able[name] for name in able if all(name in names for names, *_ in every)}
        return (able, *known) if all(theirs == [*known] for _, *theirs in every) else (able, None, {})

    def check(self, what: Mapping[str, str]) -> None:
        """Refuse ranks that would choose differently.

        Raises:
            ValueError: for other kernels, versions or settings than the first rank's.
        """
        ours = {"kernels": isa.tier(), "torch": torch.__version__, "opsmith": VERSION, **what}
        (rank, first), *others = self.gather([dist.get_rank(), ours])
        for other, theirs in others:
            for name, value in theirs.items():
                if value != first[name]:
                    hint = "; OPSMITH_ISA set to the lesser of them serves all" * (name == "kernels")
                    raise ValueError(
                        f"optimize: all ranks of a sharded model must choose alike, and rank {other} has "
                        f"{name} {value}, rank {rank} {first[name]}{hint}"
                    )


def agreed(ranks: Ranks | None, why: str) -> str:
    """Why none may do something: this rank's reason, or another's. What one does alone has others wait for it."""
    every = [] if ranks is None else ranks.gather([dist.get_rank(), why])
    return why or next((f"rank {rank}: {theirs}" for rank, theirs in every if theirs), "")


class SharedTimes(dict[str, dict[str, float]]):
    """Measured times as all ranks take them. None are known before or kept: files of several machines differ."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def settled(self, key: str, times: dict[str, float], steady: bool) -> dict[str, float]:
        """Of what every rank can run, the slowest's time."""
        every = self._ranks.gather(times)
        return {name: max(t[name] for t in every) for name in times if all(name in t for t in every)}

    def save(self) -> None:
        """Nothing is kept."""
