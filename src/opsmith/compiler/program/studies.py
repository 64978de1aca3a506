"""How studies came out, so that the same one is not run again.

A study runs a graph to see what each site is called with, chooses, and proves. Where graph, inputs, weights, code,
settings and machine are what they were, to the last bit, it would choose and prove the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from opsmith.compiler.choose import inductor
from opsmith.compiler.find.site import Site
from opsmith.compiler.kept import Kept, directory
from opsmith.compiler.program.sites import Settled, Sites
from opsmith.compiler.program.study import Progress, Study
from opsmith.compiler.prove.proofs import Proofs, scope
from opsmith.operator import Verdict

SCHEMA = 1
STUDIES = 64  # what a file keeps: an example of a graph each


@dataclass(frozen=True)
class Outcome:
    """What a study found out."""

    apart: list[str]  # the sites that run as their parts, as they were divided
    sites: dict[str, Settled]


class Studies:
    """The outcomes of studies, by graph, inputs, settings, and what was known of the sites before; and the proofs."""

    def __init__(self) -> None:
        self.proofs = Proofs()

    @cached_property
    def _file(self) -> Kept[Any]:
        machine, here = scope()
        return Kept(directory() / f"studies-{machine}.json", SCHEMA, here, lambda entry: True, STUDIES)

    def run(
        self, sites: Sites, args: Sequence[Any], training: bool, progress: Progress | None = None
    ) -> list[tuple[str, Site]]:
        """The sites of a graph that stay, each with a choice that is proved: as they were found before, or now."""
        provable = sites.selector.config.verify and not training and not sites.effects.random
        proved = self.proofs.of(sites.gm, args) if provable else None
        key = None if proved is None or proved.study is None else _key(sites, proved.study)
        known = None if key is None else _read(self._file.get(key))
        if proved is not None and known is not None:
            verdicts = {n: v for n, site in known.sites.items() if (v := proved.get(site.proof)) is not None}
            if len(verdicts) == len(known.sites):
                return _recall(sites, known, verdicts)
        with torch.no_grad():
            if inductor.busy() and not sites.effects.inputs(sites.gm.graph):
                Study(sites, args, training, proved).foresee(while_=inductor.busy)
            inductor.wait()
            study = Study(sites, args, training, proved, progress)
            kept = study.run()
        if key is not None and study.repeatable and not sites.selector.guessed:
            self._file.put(key, _OUTCOME.dump_python(Outcome(study.apart, study.settled), mode="json"))
        return kept

    def save(self) -> None:
        """Keep what is new for the next process."""
        self.proofs.save()
        self._file.save()


def _key(sites: Sites, study: str) -> str:
    """All that choices follow from besides what proofs do: settings, a plan, contestants, and earlier examples."""
    selector, named = sites.selector, sites.named
    cards = {s.card.name: s.card for site in named.values() for s in (site, *site.parts)}
    state = [
        selector.config.model_dump_json(),
        sorted(selector.fixed.items()),
        sorted(
            (name, [(i.name, i.available()) for i in card.implementations]) for name, card in cards.items()
        ),
        [(r.name, r.pattern, r.status, r.why) for r in sites.report.sites],
        [[n.name for n in site.outputs] for site in named.values()],
        sites.studied,
    ]
    return f"{study} {hashlib.sha256(repr(state).encode()).hexdigest()}"


def _recall(sites: Sites, outcome: Outcome, verdicts: Mapping[str, Verdict]) -> list[tuple[str, Site]]:
    """Put a graph's sites where a study left them."""
    inductor.wait()  # as before a study: something may be timed next
    for name in outcome.apart:
        sites.divide(name)
    for name, site in outcome.sites.items():
        sites.recall(name, site, verdicts[name])
    return [(name, sites[name].site) for name in outcome.sites]


_OUTCOME = TypeAdapter(Outcome)


def _read(entry: Any) -> Outcome | None:
    try:
        return None if entry is None else _OUTCOME.validate_python(entry)
    except ValidationError:
        return None
