"""`opsmith ops`: operators x implementations, and why one is unavailable here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from opsmith import backends
from opsmith.cli.common import Json, Names, Output, choose

if TYPE_CHECKING:
    import torch

    from opsmith.operator import Implementation, Operator


def run(names: Names = None, json: Json = None) -> None:
    """List operators and their implementations in the order of trial, and why one is unavailable here.

    Example: opsmith ops layer_norm
    """
    output = Output(json)
    rows = [
        {"operator": card.name, "kind": card.kind.value, **_describe(card, implementation)}
        for card in choose(names, everything=not names)
        for implementation in card.implementations
    ]
    table = Table("operator", "kind", "implementation", "device", "here", box=None, pad_edge=False)
    previous = None
    for row in rows:
        first = row["operator"] != previous
        previous = row["operator"]
        why = str(row["reason"]).partition("\n")[0]  # a compiler's goes on with the source
        here = ", ".join(row["dtypes"]) if row["available"] else Text(f"no: {why}", "yellow")
        head = (row["operator"], row["kind"]) if first else ("", "")
        table.add_row(*head, row["implementation"], row["device"], here)
    output.console.print(table)
    output.finish({"operators": rows})


def _describe(card: Operator, implementation: Implementation) -> dict[str, Any]:
    """In which dtypes an implementation takes the card's samples on this machine, or why in none."""
    answers = {str(d).removeprefix("torch."): _accepts(card, implementation, d) for d in card.dtypes}
    dtypes = [name for name, answer in answers.items() if answer is True]
    return {
        "implementation": implementation.name,
        "device": implementation.device,
        "available": bool(dtypes),
        "dtypes": dtypes,
        "reason": None if dtypes else next(map(str, answers.values()), ""),
    }


def _accepts(card: Operator, implementation: Implementation, dtype: torch.dtype) -> bool | str:
    """True when the implementation takes at least one of the card's samples, else its first refusal."""
    from opsmith.operator import Make

    device = "cpu" if implementation.device == "any" else implementation.device
    other = backends.taking(device)
    here = other.here() if other else backends.available(device)
    if here is not True:
        return here
    answers = (implementation.accepts(*s.args, **s.kwargs) for s in card.samples(Make(dtype, device)))
    first = next(answers, f"{card.name} has no samples in {dtype}")
    return True if first is True or True in answers else first
