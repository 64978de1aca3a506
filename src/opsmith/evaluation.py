"""How well a model predicts a text, and how far its predictions are from another model's."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opsmith.compiler.meanwhile import meanwhile
from opsmith.compiler.modules.texts import beginning_and_rows

_AT_ONCE = 256 << 20  # bytes of float32 logits that one model may give at a time, where it can give fewer
_ROWS = 64  # of logits that are worked on at a time
_BLOCK = 64  # neighboring predictions that are resampled together
_FEWEST = 6  # blocks, of which an interval can be told
_RESAMPLES = 2000


class Estimate(float):
    """A number measured on a sample, and the ends of its 95 % interval; NaN where the sample is too small for one."""

    low: float
    high: float

    def __new__(cls, value: float, low: float = math.nan, high: float = math.nan) -> Estimate:
        made = super().__new__(cls, value)
        made.low, made.high = low, high
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Estimate, (float(self), self.low, self.high)

    def to_dict(self) -> dict[str, float | None]:
        """For JSON: the value, low and high; numbers that are none as null."""
        numbers = {"value": float(self), "low": self.low, "high": self.high}
        return {name: n if math.isfinite(n) else None for name, n in numbers.items()}

    def __str__(self) -> str:
        return f"{float(self):.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        perplexity: `exp` of the mean negative log likelihood of each next token.
        kl: mean Kullback-Leibler divergence of this model's distribution from the original's, in nats; None where
            there is no original.
        agreement: share of predictions whose most likely token is the original's.
        ratio: this model's perplexity over the original's, on the same predictions: its interval is narrower than
            those of both, as most of what makes a text hard is the same for both.
        predictions: how many tokens were predicted.
        window: the most tokens that a prediction could see, and itself.
    """

    perplexity: Estimate
    kl: Estimate | None
    agreement: Estimate | None
    ratio: Estimate | None
    predictions: int
    window: int

    def table(self) -> str:
        """The numbers for people, a line each."""
        lines = [f"perplexity        {self.perplexity}"]
        if self.ratio is not None and self.kl is not None and self.agreement is not None:
            lines += [
                f"over original     {self.ratio}",
                f"KL divergence     {self.kl} nats",
                f"same top token    {self.agreement}",
            ]
        return "\n".join([*lines, f"{self.predictions} predictions, windows of {self.window} tokens"])

    def to_dict(self) -> dict[str, Any]:
        """For JSON: each estimate as its own `to_dict` has it."""
        return {n: v.to_dict() if isinstance(v, Estimate) else v for n, v in vars(self).items()}

    def to_json(self) -> str:
        """The numbers for machines."""
        return json.dumps(self.to_dict(), indent=2)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    text_or_ids: str | Tensor | Sequence[int],
    *,
    against: nn.Module | None = None,
    window: int = 512,
    tokenizer: Any = None,
) -> Evaluation:
    """How well a causal language model predicts a text, and how far its predictions are from another model's.

    The text is cut into windows that do not overlap. Within each, every token but the first is predicted from those
    before it: perplexity is `exp(-mean log p(token))`, `kl` is `mean sum_v a(v) log(a(v) / p(v))` with the
    distributions a of `against` and p of the model, `agreement` how often both have the same most likely token.

    >>> opsmith.optimize(model, quantize="int4")
    >>> found = opsmith.evaluate(model, Path("book.txt").read_text(), against=original)
    >>> print(found.table())
    >>> found.perplexity, found.perplexity.low, found.perplexity.high

    Intervals hold 95 % of 2000 resamples (bootstrap) of blocks of up to 64 neighboring predictions, which are not
    independent of each other. They say how well this text was measured, not what another text would give.

    Args:
        model: gives logits `[1, tokens, vocabulary]` for `input_ids` `[1, tokens]`, as Hugging Face's causal models do,
            or for its first argument; optimized or not, in any dtype. It runs in evaluation mode.
        text_or_ids: a text; or its tokens, `[tokens]` or `[texts, tokens]`, integers. In a text each window begins with
            what the tokenizer puts in front of every text; ids are taken as they are.
        against: another model of the same vocabulary, such as the one before quantization. Both run window by window,
            and no more than one window's logits of each are held.
        window: tokens in each window, at most as many as the model has positions; the last may have fewer.
        tokenizer: for a text; found by `model.name_or_path` where it is left out.

    Raises:
        TypeError, ValueError: for what is no model or no text, and where a model's logits are not finite.

    Source: Jelinek et al., "Perplexity, a measure of the difficulty of speech recognition tasks", 1977; Künsch, "The
    jackknife and the bootstrap for general stationary observations", 1989.
    """
    models = [model] if against is None else [model, against]
    for name, one in zip(("model", "against"), models, strict=False):
        if not isinstance(one, nn.Module):
            raise TypeError(f"evaluate: {name} must be a torch.nn.Module, got {type(one).__name__}")
    if isinstance(window, bool) or not isinstance(window, int) or window < 2:
        raise ValueError(f"evaluate: window must be a number of tokens, 2 or more, got {window!r}")
    windows = _windows(model, text_or_ids, window, tokenizer)
    _check_vocabularies([size for one in models if (size := _said(one, "vocab_size"))])
    measured = []
    with meanwhile([m for one in models for m in one.modules()], "training", False):
        for tokens in windows:
            measured += [block for part in _compare(models, tokens) for block in part.split(_BLOCK)]
    return _estimates(measured, window)


def _estimates(blocks: list[Tensor], window: int) -> Evaluation:
    """From the numbers of each prediction, in blocks: [predictions, 1 or 4], see `_compare`."""
    sums = torch.stack([block.sum(0) for block in blocks]).numpy()
    counts = np.array([len(block) for block in blocks])
    total = int(counts.sum())
    means = sums.sum(0) / total
    resampled = np.full((1, sums.shape[1]), math.nan)
    if len(blocks) >= _FEWEST:
        taken = np.random.default_rng(0).integers(len(blocks), size=(_RESAMPLES, len(blocks)))
        resampled = sums[taken].sum(1) / counts[taken].sum(1)[:, None]

    def estimate(of: Callable[[Any], Any]) -> Estimate:
        low, high = np.percentile(of(resampled.T), (2.5, 97.5))
        return Estimate(float(of(means)), float(low), float(high))

    compared = len(means) > 1
    return Evaluation(
        perplexity=estimate(lambda m: np.exp(m[0])),
        kl=estimate(lambda m: m[2]) if compared else None,
        agreement=estimate(lambda m: m[3]) if compared else None,
        ratio=estimate(lambda m: np.exp(m[0] - m[1])) if compared else None,
        predictions=total,
        window=window,
    )


def _compare(models: Sequence[nn.Module], tokens: Tensor) -> Iterator[Tensor]:
    """For one window [tokens], [predictions, 1 or 4] in float64: negative log likelihood; with another model its own
    too, the divergence from it, and whether both have the same most likely token.
    """
    calls = [_Logits(model, tokens) for model in models]
    step = min(call.at_once for call in calls)
    for first in range(0, len(tokens) - 1, step):
        last = min(first + step, len(tokens) - 1)
        logits = [call(first, last) for call in calls]
        _check_vocabularies([one.shape[-1] for one in logits])
        for row in range(0, last - first, _ROWS):
            rows = slice(row, row + _ROWS)
            wanted = tokens[first + 1 : last + 1][rows, None]
            logs = [one[rows].float().log_softmax(-1) for one in logits]
            numbers = [-one.gather(-1, wanted.to(one.device))[:, 0] for one in logs]
            if len(logs) == 2:
                own, other = logs[0], logs[1].to(logs[0].device)
                numbers.append((other.exp() * (other - own)).sum(-1, dtype=torch.float64))
                numbers.append(own.argmax(-1) == other.argmax(-1))
            found = torch.stack([n.double().cpu() for n in numbers], -1)
            if not bool(found.isfinite().all()):
                raise ValueError(
                    "evaluate: logits are not finite, so nothing can be said of them; "
                    "run the model in a wider dtype, or look for what overflows"
                )
            yield found


class _Logits:
    """One model's logits for the tokens of a window, no more of them at a time than memory should hold."""

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        names = inspect.signature(model.forward).parameters
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._model, self._ids = model, tokens[None].to(device)
        self._named = "input_ids" in names
        self._options = {"use_cache": False} if "use_cache" in names else {}
        self.at_once = len(tokens)
        vocabulary = _said(model, "vocab_size")
        if "logits_to_keep" in names and vocabulary:
            self.at_once = max(1, _AT_ONCE // (4 * vocabulary))

    def __call__(self, first: int, last: int) -> Tensor:
        """[last - first, vocabulary]: what follows each of these tokens."""
        options: dict[str, Any] = dict(self._options)
        if part := self.at_once < self._ids.shape[1] - 1:
            options["logits_to_keep"] = torch.arange(first, last, device=self._ids.device)
        given = {"input_ids": self._ids} if self._named else {}
        result = self._model(*([] if given else [self._ids]), **given, **options)
        logits = getattr(result, "logits", result[0] if isinstance(result, tuple) else result)
        expected = last - first if part else self._ids.shape[1]
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if not isinstance(logits, Tensor) or shape[:-1] != (1, expected):
            raise ValueError(
                f"evaluate: {type(self._model).__name__} must give logits [1, {expected}, vocabulary] for "
                f"{self._ids.shape[1]} tokens, got {shape}; give a causal language model"
            )
        return logits[0] if part else logits[0, first:last]


def _said(model: nn.Module, name: str) -> int | None:
    """A number of the model's configuration, if it has it."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    size = getattr(text, name, None)
    return size if isinstance(size, int) else None


def _check_vocabularies(sizes: list[int]) -> None:
    if len(set(sizes)) > 1:
        raise ValueError(
            f"evaluate: the models' vocabularies differ, {sizes[0]} and {sizes[1]} tokens; against must be a model of "
            "the same tokenizer"
        )


def _windows(model: nn.Module, given: Any, window: int, tokenizer: Any) -> list[Tensor]:
    """The tokens of each window, two or more."""
    before, rows = beginning_and_rows("evaluate", model, given, tokenizer)
    size = _said(model, "vocab_size")
    if size is not None and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < size:
        wrong = rows[(rows < 0) | (rows >= size)][0]
        raise ValueError(f"evaluate: ids must be from 0 to {size - 1}, the model's vocabulary, got {wrong}")
    fresh = window - len(before)
    if fresh < 1:
        raise ValueError(
            f"evaluate: window must hold more than the {len(before)} tokens that every text begins with"
        )
    windows = [torch.cat((before, part)) for row in rows for part in row.split(fresh)]
    if not (windows := [one for one in windows if len(one) > 1]):
        raise ValueError(
            "evaluate: a text of at least two tokens is needed: the first is what the second is predicted from"
        )
    most, longest = _said(model, "max_position_embeddings"), max(map(len, windows))
    if most is not None and 0 < most < longest:
        raise ValueError(
            f"evaluate: window must be {most} at most, as many positions as the model has, got {longest}"
        )
    return windows
