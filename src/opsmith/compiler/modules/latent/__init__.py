"""Multi-head latent attention in a whole model: found, proved, switched on for each call that it serves, taken out.

A call is prepared before the captured graph runs: its cache gets pages, its tokens slots. A call that it cannot serve
runs the original attention, and the report says why.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from opsmith.compiler.config import Config
from opsmith.compiler.modules.latent import prove as latent_prove
from opsmith.compiler.modules.latent.find import Reading, candidates
from opsmith.compiler.modules.latent.pages import Pages
from opsmith.compiler.modules.latent.site import FORMS, LatentSite, Switch, operations
from opsmith.ops.mla.cache import MLACache

Call = Callable[..., Any]


@dataclass
class LatentReport:
    """One attention layer that keeps latent rows, or why it does not."""

    name: str
    status: str = "found"  # until it has been proved, then "kept" or "rolled back"
    heads: int = 0
    values: int = 0  # cached for a token
    plain_values: int = 0  # that attention with keys and values of all heads would cache
    token_bytes: int = 0
    mode: str = ""
    weights: str = ""  # how they are quantized
    error: float = 0.0
    bound: float = 0.0
    lost: float = 0.0  # relative, by quantized weights or rows
    why: str = ""

    def __str__(self) -> str:
        if self.status != "kept":
            return f"{self.name} {self.status}: {self.why}"
        return (
            f"{self.name}: {self.values} values ({self.token_bytes} bytes) a token in mode {self.mode!r}, "
            f"{self.plain_values} with keys and values of {self.heads} heads"
        )


class Latent:
    """The latent attention of one model."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.switch = Switch()
        self.sites: list[LatentSite] = []
        self.reports: list[LatentReport] = []
        self.fallbacks: Counter[str] = Counter()
        self._readings: dict[str, list[Reading]] = {}
        self._lock = threading.RLock()
        self._names: list[str] = []
        self._whole = False

    def put_in(self, model: nn.Module) -> set[str]:
        """Find the modules; the names of layers whose weights they take over."""
        if self.config.mla_cache == "off":
            return set()
        names = {module: name for name, module in model.named_modules()}
        taken: set[str] = set()
        for name, module, readings in candidates(model):
            self._check_mode(readings)
            site = LatentSite(name, module, len(self.sites), self.switch)
            self.sites.append(site)
            self._readings[name] = readings
            self.reports.append(LatentReport(name))
            taken |= {names[m] for r in readings for m in r.absorbed}
        self._names = list(inspect.signature(model.forward).parameters)
        return taken

    def _check_mode(self, readings: list[Reading]) -> None:
        """Refuse a cache that no reading's sizes fit before anything is changed."""
        for last, r in enumerate(readings, 1 - len(readings)):
            try:
                MLACache.allocate(
                    self.config.mla_cache,
                    0,
                    self.config.mla_block,
                    kv_lora=r.kv_lora,
                    rope=r.rope,
                    dtype=r.kv_a.weight.dtype,
                    device="meta",
                )
                return
            except ValueError:
                if not last:
                    raise

    @property
    def waiting(self) -> bool:
        """Whether there is something to prove, which takes a first call."""
        return bool(self._readings)

    def prove(self, model: nn.Module, run: Call) -> None:
        """Run the model once as it is, then settle and prove each layer on what it was given."""
        found: dict[str, latent_prove.Seen] = {}

        def keep(site: LatentSite) -> Call:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                given = dict(zip(site.names, args, strict=False)) | kwargs
                x, table = given.get("hidden_states"), given.get("position_embeddings")
                if site.name not in found and isinstance(x, torch.Tensor) and x.dim() == 3 and x.numel():
                    found[site.name] = latent_prove.seen(x, table)

            return hook

        hooks = [s.module.register_forward_pre_hook(keep(s), with_kwargs=True) for s in self.sites]
        try:
            with torch.no_grad():
                run()
        finally:
            for hook in hooks:
                hook.remove()
        kept: list[LatentSite] = []
        for site, report in zip(self.sites, self.reports, strict=True):
            if site.name not in found:
                report.status, report.why = "rolled back", "the example did not reach it"
            elif self._settle(site, report, found[site.name]):
                site.index = len(kept)
                kept.append(site)
                site.module.forward = site.forward
        self.sites, self._readings = kept, {}
        config: Any = getattr(model, "config", None)
        self._whole = bool(kept) and len(kept) == getattr(config, "num_hidden_layers", -1)

    def _settle(self, site: LatentSite, report: LatentReport, found: latent_prove.Seen) -> bool:
        from opsmith.compiler.modules.latent import cache as latent_cache

        verdict = latent_prove.settle(site, self._readings[site.name], found, latent_cache.new)
        report.error, report.bound, report.why = verdict.error, verdict.bound, verdict.why
        if not verdict.ok:
            report.status = "rolled back"
            return False
        r = site.reading
        report.heads, report.values = r.heads, r.kv_lora + r.rope
        report.plain_values = r.heads * (r.nope + r.rope + r.value)
        form = FORMS.get(self.config.quantize or "")
        names = {m: n for n, m in site.module.named_modules(prefix=site.name)}
        skipped = [
            p
            for p in self.config.quantize_skip
            if any(fnmatchcase(names[m], p) for m in site.reading.absorbed)
        ]
        if form is not None and not skipped:
            site.quantize = form
            try:
                site.weights()
            except ValueError as error:  # a bias that this form has no place for
                site.quantize, report.why = None, f"weights stay as they are: {error}"
        if self.config.mla_cache == "int8_tiled":
            latent_prove.calibrate(site, found)
        report.status, report.mode, report.weights = "kept", self.config.mla_cache, site.quantize or ""
        report.token_bytes = site.cache(report.mode, 1, self.config.mla_block).token_bytes
        if site.quantize is not None or site.scales is not None:
            report.lost = latent_prove.lost(site, found, report.mode)
        return True

    def take_out(self) -> None:
        """Give every module its own call back."""
        for site in self.sites:
            site.module.__dict__.pop("forward", None)
            site.close()
        self.sites, self._readings = [], {}

    @contextmanager
    def step(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], bool]]:
        """Prepare a call: what to call with, and whether through the captured graph."""
        with self._lock:
            given = dict(zip(self._names, args, strict=False)) | kwargs
            why = self._refusal(model, given)
            pages = None
            if why is None:
                pages, why = self._pages(model, given)
            if why is not None:
                self.fallbacks[why] += 1
            if pages is None:
                # A cache that writes in place, pages too, changes at every run of a graph, and studying takes several.
                cache = given.get("past_key_values")
                yield args, kwargs, cache is None or _grows(cache)
                return
            tokens = _input(given).shape[1]
            if given.get("position_ids") is None and "position_ids" in self._names:
                start = pages.columns
                given["position_ids"] = torch.arange(start, start + tokens, device=pages.device).unsqueeze(0)
            if self._whole:
                # Nobody reads the mask any more, and the library takes one of four dimensions as it is: a graph
                # without the growing one stays the same at every length.
                given["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=pages.device)
            self.switch.on, self.switch.step = True, pages.begin(tokens)
            try:
                yield (), given, True
                pages.commit(tokens)
            finally:
                self.switch.on, self.switch.step = False, None

    def _refusal(self, model: nn.Module, given: dict[str, Any]) -> str | None:
        if "past_key_values" not in self._names:
            return "the model's call takes no past_key_values"
        if model.training:
            return "the model is in training mode"
        if torch.is_grad_enabled() and any(
            p.requires_grad for s in self.sites for p in s.module.parameters()
        ):
            return "gradients are recorded"
        config: Any = getattr(model, "config", None)
        if given.get("output_attentions") or getattr(config, "output_attentions", False):
            return "attention weights are asked for"
        x = _input(given)
        if not isinstance(x, torch.Tensor) or not x.numel():
            return "there is no input of tokens"
        if torch.is_autocast_enabled(x.device.type):
            return "autocast is on"
        if given.get("past_key_values") is None:
            use = given.get("use_cache")
            if not (getattr(config, "use_cache", False) if use is None else use):
                return "no cache is asked for"
        return None

    def _pages(self, model: nn.Module, given: dict[str, Any]) -> tuple[Pages | None, str | None]:
        """The pages of the call's cache, which is taken over where it is the library's own; or why not."""
        from opsmith.compiler.modules.latent import cache as latent_cache

        cache = given.get("past_key_values")
        why = None if cache is None else latent_cache.unfit(cache)
        if why is not None:
            return None, why
        x = _input(given)
        past = 0 if cache is None else cache.get_seq_length()
        starts = _padding(given.get("attention_mask"), x.shape[0], past + x.shape[1])
        if isinstance(starts, str):
            return None, starts
        if cache is None:
            cache = given["past_key_values"] = latent_cache.new()
        pages = _pages_of(cache)
        if pages is None:
            if past and not all(site.portable for site in self.sites):
                return None, "the cache has keys of heads in it"
            pages = self._adopt(cache, x.shape[0], x.device, starts)
        if pages.batch != x.shape[0]:
            raise ValueError(
                f"opsmith: the cache is for a batch of {pages.batch}, the input has {x.shape[0]} sequences"
            )
        if not past:
            _start(pages, starts)
        elif starts is not None and not torch.equal(starts, pages.starts):
            return None, "the mask hides other columns than those of the padding at the left"
        return pages, None

    def _adopt(self, cache: Any, batch: int, device: torch.device, starts: torch.Tensor | None) -> Pages:
        """Latent layers in the place of the library's; rows that these have move into pages."""
        from transformers.cache_utils import DynamicLayer

        from opsmith.compiler.modules.latent.cache import LatentLayer

        size = self.config.mla_block
        pools = [s.cache(self.config.mla_cache, batch, size) for s in self.sites]
        pages = Pages(pools, batch, size, device)
        _start(pages, starts)
        before = list(cache.layers)
        depth = 1 + max(int(s.module.layer_idx) for s in self.sites)  # type: ignore[arg-type]
        while len(cache.layers) < depth:
            cache.layers.append(DynamicLayer())
        for site in self.sites:
            at = int(site.module.layer_idx)  # type: ignore[arg-type]
            cache.layers[at] = LatentLayer(pages, site.index, site.reading.kv_lora, site.order)
            if at < len(before) and before[at].get_seq_length():
                cache.layers[at].update(before[at].keys, before[at].values)
        return pages

    def lines(self) -> list[str]:
        """For the plan: what is cached, and when which form runs."""
        lines = []
        for report, sites in _alike(self.reports, self.sites):
            r = sites[0].reading
            first = next((n for n in _LENGTHS if _cheaper(r, n, n) == "expanded"), None)
            switch = (
                "absorbed at every length"
                if first is None
                else f"a prompt of {first} tokens or more expanded, decoding absorbed"
            )
            at = 4096
            decode = operations(r, 1, 1, at)
            ratio = decode["expanded"] / decode["absorbed"]
            lines.append(
                f"  {len(sites):3d} x mla          {report.mode:<8} {report.values} values "
                f"({report.token_bytes} bytes) a token and layer instead of {report.plain_values}; {switch} "
                f"(by operations: one token at {at} rows {decode['absorbed'] / 1e6:.0f} M, expanded {ratio:.0f} x)"
            )
        return lines


_LENGTHS: Sequence[int] = [2**i for i in range(1, 15)]


def _cheaper(r: Reading, tokens: int, columns: int) -> str:
    counts = operations(r, 1, tokens, columns)
    return min(counts, key=counts.__getitem__)


def _alike(
    reports: list[LatentReport], sites: list[LatentSite]
) -> list[tuple[LatentReport, list[LatentSite]]]:
    by_name = {s.name: s for s in sites}
    groups: dict[tuple[Any, ...], tuple[LatentReport, list[LatentSite]]] = {}
    for report in reports:
        if report.name in by_name:
            key = (report.values, report.plain_values, report.token_bytes)
            groups.setdefault(key, (report, []))[1].append(by_name[report.name])
    return list(groups.values())


def _input(given: dict[str, Any]) -> Any:
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def _padding(mask: Any, batch: int, columns: int) -> torch.Tensor | str | None:
    """[batch]: how many columns at the left are padding; None without a mask; a text where it is another mask."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return "the mask is not one of padding"
    if tuple(mask.shape) != (batch, columns):
        return "the mask has another length than the cache and the input"
    kept = mask.to(torch.bool)
    starts = columns - kept.sum(1)
    at = torch.arange(columns, device=mask.device)
    if not torch.equal(kept, at >= starts[:, None]):
        return "the mask hides other columns than those of the padding at the left"
    return starts


def _start(pages: Pages, starts: torch.Tensor | None) -> None:
    if starts is not None:
        pages.starts, pages.padded = starts.to(torch.int64), bool(starts.any())


def _pages_of(cache: Any) -> Pages | None:
    return next((x.pages for x in getattr(cache, "layers", ()) if hasattr(x, "pages")), None)


def _grows(cache: Any) -> bool:
    """Whether a cache is of the library's own kind, which makes new tensors of old ones."""
    from opsmith.compiler.modules.latent import cache as latent_cache

    return latent_cache.unfit(cache) is None and _pages_of(cache) is None
