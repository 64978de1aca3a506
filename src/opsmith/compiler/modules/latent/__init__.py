"""Multi-head latent attention in a whole model: found, proved, switched on for each call that it serves, taken out.

A call is prepared before the captured graph runs: its cache gets pages, its tokens slots. A call that it cannot serve
runs the original attention, and the report says why.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from opsmith.call.dispatch import is_sharded
from opsmith.compiler.choose.ranks import Ranks, agreed
from opsmith.compiler.config import Config
from opsmith.compiler.meanwhile import meanwhile
from opsmith.compiler.modules import conventions
from opsmith.compiler.modules.latent import prove as latent_prove
from opsmith.compiler.modules.latent.find import Reading, candidates
from opsmith.compiler.modules.latent.pages import LatentPages
from opsmith.compiler.modules.latent.site import (
    FORMS,
    OPERATORS,
    Laid,
    LatentReport,
    LatentSite,
    Switch,
    cheaper,
    operations,
)
from opsmith.compiler.modules.paged import Run, keep_one
from opsmith.decoding import laying


class Latent:
    """The latent attention of one model."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.switch = Switch()
        self.sites: list[LatentSite] = []
        self.reports: list[LatentReport] = []
        self.fallbacks: Counter[str] = Counter()
        self.waiting = False  # whether there is something to prove, which takes a first call
        self._lock = threading.RLock()
        self._whole = False
        self._spare: list[Any] = []  # memory of a cache that is gone

    def find(self, model: nn.Module) -> set[str]:
        """Find the modules; the names of layers whose weights they take over."""
        if self.config.mla_cache == "off":
            return set()
        names = {module: name for name, module in model.named_modules()}
        taken: set[str] = set()
        for name, module, readings in candidates(model):
            self._check_mode(readings)
            if any(map(is_sharded, module.parameters())):
                spread = LatentReport(name, "rolled back", why="its weights are spread over ranks")
                self.reports.append(spread)
                continue
            self.sites.append(LatentSite(name, module, readings, self.switch))
            self.reports.append(self.sites[-1].report)
            taken |= {names[m] for r in readings for m in r.absorbed}
        self.waiting = bool(self.sites)
        return taken

    def _check_mode(self, readings: list[Reading]) -> None:
        """Refuse a cache that no reading's sizes fit before anything is changed."""
        for last, r in enumerate(readings, 1 - len(readings)):
            try:
                r.cache(self.config.mla_cache, 0, self.config.mla_block, "meta")
                return
            except ValueError:
                if not last:
                    raise

    def study(self, model: nn.Module, run: Callable[[], object]) -> None:
        """Run the model once as it is, then settle and prove each layer on what it was given."""
        sites = {site.module: site for site in self.sites}
        found: dict[str, latent_prove.Seen] = {}

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            site = sites[module]
            given, known = dict(zip(site.names, args, strict=False)) | kwargs, site.readings
            roles = conventions.roles(given, result, known[0].kv_a.in_features, {r.rope for r in known})
            if site.name not in found and roles is not None and given[roles.hidden].numel():
                site.roles = roles
                found[site.name] = latent_prove.seen(roles, given)

        with ExitStack() as hooks, torch.no_grad():
            for module in sites:
                hooks.enter_context(module.register_forward_hook(keep, with_kwargs=True))
            run()
        kept: list[LatentSite] = []
        ranks = Ranks.of(model)
        for site in self.sites:
            if site.name not in found:
                site.report.status, site.report.why = "rolled back", "the example did not reach it"
            elif self._prove(site, found[site.name], ranks):
                site.index = len(kept)
                kept.append(site)
                site.module.forward = site.forward
        self.sites, self.waiting = kept, False
        self._whole = bool(kept) and len(kept) == conventions.layers(model)

    def _prove(self, site: LatentSite, found: latent_prove.Seen, ranks: Ranks | None) -> bool:
        report = site.report
        with latent_prove.inputs_as_they_are(site.module):
            verdict = latent_prove.identify(site, found)
        report.error, report.bound, report.why = verdict.error, verdict.bound, agreed(ranks, verdict.failure)
        if report.why:
            report.status = "rolled back"
            return False
        r = site.reading
        report.heads, report.values = r.heads, r.kv_lora + r.rope
        report.plain_values = r.heads * (r.nope + r.rope + r.value)
        # Numbers of few bits are the model's own: nobody asked for others.
        form = None if r.packed else FORMS.get(self.config.quantize or "")
        names = [n for n, m in site.module.named_modules(prefix=site.name) if m in r.absorbed]
        skipped = any(fnmatchcase(n, p) for n in names for p in self.config.quantize_skip)
        if form is not None and not skipped:
            site.quantize = form
            try:
                site.weights()
            except ValueError as error:  # a bias that this form has no place for
                site.quantize, report.why = None, f"weights stay as they are: {error}"
        if self.config.mla_cache == "int8_tiled":
            latent_prove.calibrate(site, found)
        report.status, report.mode = "kept", self.config.mla_cache
        report.weights, report.operators = site.quantize or r.packed, OPERATORS[bool(r.packed)]
        report.token_bytes = site.cache(report.mode, 1, self.config.mla_block).token_bytes
        if site.quantize is not None or site.scales is not None or "int8_dynamic" in r.packed:
            report.lost = latent_prove.lost(site, found, report.mode)
        return True

    def take_out(self) -> None:
        """Give every module its own call back."""
        for site in self.sites:
            site.module.__dict__.pop("forward", None)
            site.close()
        self.sites, self.waiting = [], False

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        """The model's call: by `run` on pages, where these serve it."""
        with self._lock:
            call = conventions.ModelCall(model, args, kwargs)
            why = call.refusal(p for s in self.sites for p in s.module.parameters())
            if not all(s.roles.known and conventions.place(s.module) is not None for s in self.sites):
                why = why or "its layers keep something else than a cache of Hugging Face's"
            pages = why or self._pages(call)
            if isinstance(pages, str):
                self.fallbacks[pages] += 1
                # A cache that writes in place, pages too, changes at every run of a graph, and studying takes several.
                through = call.cache is None or _grows(call.cache)
                return (run if through else model._call_impl)(*args, **kwargs)
            tokens = call.tokens.shape[1]
            call.say_positions(pages.columns)
            if self._whole:
                call.drop_mask()
            with meanwhile([self.switch], "on", True), laying(Laid(self.sites, pages, pages.begin(tokens))):
                result = run(**call.given)
            pages.commit(tokens)
            return result

    def _pages(self, call: conventions.ModelCall) -> LatentPages | str:
        """The pages of the call's cache, which is taken over where it is the library's own; or why not."""
        from opsmith.compiler.modules.latent import cache as latent_cache

        if call.cache is not None and (why := latent_cache.unfit(call.cache)):
            return why
        batch, tokens = call.tokens.shape[:2]
        past = 0 if call.cache is None else call.cache.get_seq_length()
        starts = call.padding(past + tokens)
        if isinstance(starts, str):
            return starts
        if call.cache is None:
            call.cache = conventions.new_cache()
        pages = conventions.pages_of(call.cache)
        if pages is None:
            if past and not all(site.portable for site in self.sites):
                return "the cache has keys of heads in it"
            size = self.config.mla_block
            pools = self._spare.pop() if self._spare else None
            pools = pools or [s.cache(self.config.mla_cache, batch, size) for s in self.sites]
            pages = LatentPages(pools, size, batch, call.tokens.device, starts)
            if call.tokens.is_cuda:  # where recorded calls read it
                weakref.finalize(pages, keep_one, self._spare, pools).atexit = False
            places = [(conventions.place(s.module) or 0, s.order) for s in self.sites]
            latent_cache.adopt(call.cache, pages, places)
        return call.begin(pages, past, starts) or pages

    def lines(self) -> list[str]:
        """For the plan: what is cached, and when which form runs."""
        lines = []
        groups: dict[tuple[Any, ...], list[LatentSite]] = {}
        for site in self.sites:
            report = site.report
            key = (report.values, report.plain_values, report.token_bytes, site.reading.packed)
            groups.setdefault(key, []).append(site)
        for alike in groups.values():
            report, r = alike[0].report, alike[0].reading
            first = next((n for n in _LENGTHS if cheaper(r, 1, n, n) == "expanded"), None)
            how = f"a prompt of {first} tokens or more expanded, decoding absorbed"
            if first is None:
                how = "absorbed at every length"
            if r.packed:
                how += f"; projections of {r.packed} as the model has them, that of keys and values unpacked"
            decode = operations(r, 1, 1, _ROWS)
            ratio = decode["expanded"] / decode["absorbed"]
            lines.append(
                f"  {len(alike):3d} x mla          {report.mode:<8} {report.values} values "
                f"({report.token_bytes} bytes) a token and layer instead of {report.plain_values}; {how} "
                f"(by operations: one token at {_ROWS} rows {decode['absorbed'] / 1e6:.0f} M, expanded {ratio:.0f} x); "
                "not timed against the model's own attention"
            )
        return lines


_LENGTHS: Sequence[int] = [2**i for i in range(1, 15)]
_ROWS = 4096  # that a token sees, for the plan's example


def _grows(cache: Any) -> bool:
    """Whether a cache is of the library's own kind, which makes new tensors of old ones."""
    from opsmith.compiler.modules.latent import cache as latent_cache

    return latent_cache.unfit(cache) is None and conventions.pages_of(cache) is None
