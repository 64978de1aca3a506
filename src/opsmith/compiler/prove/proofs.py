"""What was proved before, so that it is proved once.

A verdict follows from the graph, its inputs and weights, the implementation and the machine's code, and from nothing
else. Where all of these are what they were, to the last bit, it stands.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, fx

from opsmith import measure
from opsmith.compiler.find.site import Site
from opsmith.compiler.kept import Kept, code, directory, ours
from opsmith.kernels import libraries
from opsmith.measure.pages import Read
from opsmith.operator import Implementation, Verdict

SCHEMA = 2
_Number = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
STUDIES = 256  # what a file keeps: an example of a graph each
Verdicts = dict[str, tuple[_Number, _Number, str]]  # of each proof error, bound, and the site that it is like


class Proofs:
    """Verdicts of the sites that passed, by study: a graph on given inputs."""

    @cached_property
    def _file(self) -> Kept[Verdicts]:
        machine = measure.describe().fingerprint()
        settings = [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
        scope = f"{machine}/{libraries.content()}/{code()}/{settings}"
        return Kept(directory() / f"proofs-{machine}.json", SCHEMA, scope, Verdicts, STUDIES)

    def of(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Proved | None:
        """What was proved of this graph on these inputs; None where that cannot be kept."""
        try:
            return Proved(self._file, _digest([*_written(gm), *inputs]))
        except RuntimeError:  # a tensor that is no plain memory: a conjugate view, say
            return None

    def save(self) -> None:
        """Keep what is new for the next process."""
        self._file.save()


class Proved:
    """The verdicts of one study."""

    def __init__(self, file: Kept[Verdicts], study: str):
        self._known = dict(file.get(study) or {})
        self._save = functools.partial(file.put, study, self._known)

    def get(self, site: Site, implementation: Implementation) -> tuple[Verdict, str] | None:
        """The verdict of a proof, and the site that it is like; None where it has to be made."""
        known = self._known.get(_name(site, implementation))
        return None if known is None else (Verdict(True, *known[:2]), known[2])

    def put(self, site: Site, implementation: Implementation, verdict: Verdict, like: str = "") -> None:
        """Enter a proof, but none that failed, is of what is not ours, or may come out otherwise next time."""
        if verdict.ok and implementation.repeatable and ours(implementation.fn):
            self._known[_name(site, implementation)] = (float(verdict.error), float(verdict.bound), like)
            self._save()


def _name(site: Site, implementation: Implementation) -> str:
    """What a proof is called within its study."""
    outputs = ",".join(n.name for n in site.outputs)
    return f"{site.card.name} {site.pattern} {outputs} {implementation.name}"


def _written(gm: fx.GraphModule) -> Iterable[Any]:
    """A graph as text, with those inside it and the constants that they name."""
    for name, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            yield f"{name}: {module.code}"
            for node in module.graph.nodes:
                if node.op == "get_attr":
                    yield functools.reduce(getattr, str(node.target).split("."), module)


def _digest(values: Iterable[Any]) -> str:
    digest, read = hashlib.blake2b(), Read()
    values = [value for value in values if not isinstance(value, torch.nn.Module)]
    # Hashing leaves Python to other threads.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for value, its in zip(values, threads.map(_digest_of, values), strict=True):
            digest.update(its)
            if isinstance(value, Tensor):
                read.add(value)  # of a table, the model reads but some rows
    read.give_back()
    return digest.hexdigest()


def _digest_of(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return hashlib.blake2b(f"{type(value).__name__} {value}".encode()).digest()
    digest = hashlib.blake2b(f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}".encode())
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()
