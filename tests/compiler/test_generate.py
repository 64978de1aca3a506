"""`generate` as it is used: every way of decoding and every cache give eager's tokens, and soon capture no more."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache, TextIteratorStreamer

import opsmith
from tests.compiler.models import TINY, UNTIMED, VOCABULARY, ids, padding, seeded

NEW = 10  # tokens
SIZES = TINY | {"eos_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"num_hidden_layers": 1},
    # Windows that are shorter than what is generated, beside layers that see everything.
    "gemma3_text": SIZES
    | {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "gpt2": {  # learned positions, and weights the other way round
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    },
}


def _family(name: str) -> Any:
    """A tiny model whose largest logit is larger than the next one by more than what rounding changes."""
    model = seeded(lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **FAMILIES[name])))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    return model


class Words:
    """What a streamer asks of a tokenizer."""

    def decode(self, tokens: Any, **kwargs: Any) -> str:
        return "".join(f"{int(t)} " for t in tokens)


class Pair:
    """A model that writes, and one that drafts for it."""

    def __init__(self, model: Any, optimized: bool) -> None:
        self.model = copy.deepcopy(model)
        self.draft = copy.deepcopy(model)
        with torch.no_grad():
            for i, weight in enumerate(self.draft.parameters()):  # some drafts are accepted, and some are not
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
                weight.add_(noise * weight.std(correction=0), alpha=0.05)
        if optimized:
            for one in (self.model, self.draft):
                opsmith.optimize(one, config=UNTIMED)

    def __call__(self, prompt: Any, **options: Any) -> Any:
        if prompt is not None:  # else transformers makes a mask where it thinks that a text is padded
            options.setdefault("attention_mask", torch.ones_like(prompt))
        return self.model.generate(prompt, **{"max_new_tokens": NEW, "do_sample": False, **options})

    @property
    def captured(self) -> int:
        """How many graphs."""
        return sum(len(m.opsmith.graphs) + len(m.opsmith.unread) for m in (self.model, self.draft))


def _sampled(pair: Pair, length: int) -> torch.Tensor:
    torch.manual_seed(3)
    result: torch.Tensor = pair(ids(2, length), do_sample=True, top_k=8, top_p=0.9, temperature=0.7)
    return result


def _padded(pair: Pair, length: int) -> torch.Tensor:
    mask = padding(3, length).flip(1)  # at the left
    result: torch.Tensor = pair(ids(3, length) * mask, attention_mask=mask.long())
    return result


def _streamed(pair: Pair, length: int) -> torch.Tensor:
    streamer: Any = TextIteratorStreamer(Words(), skip_prompt=True)  # type: ignore[arg-type]
    options = {"streamer": streamer}
    thread = threading.Thread(target=pair, args=(ids(1, length),), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    return torch.tensor([int(word) for word in text.split()])


def _chat(pair: Pair, length: int, cache: Any) -> torch.Tensor:
    text = ids(1, length)
    for turn in range(3):
        text = torch.cat([pair(text, past_key_values=cache, max_new_tokens=4), ids(1, 3, seed=turn)], 1)
    return text


def _inference(pair: Pair, length: int) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = pair(ids(2, length))
    return result.clone()


def _threads(pair: Pair, length: int) -> torch.Tensor:
    results: list[Any] = [None] * 4

    def run(i: int) -> None:
        results[i] = pair(ids(1 + i % 2, length + i))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([r.flatten() for r in results])


MODES: dict[str, Callable[[Pair, int], torch.Tensor]] = {
    "greedy": lambda pair, n: pair(ids(2, n)),
    "one sequence": lambda pair, n: (
        pair(ids(1, n), return_dict_in_generate=True, output_scores=True).sequences
    ),
    "sampling": _sampled,
    "beams": lambda pair, n: pair(ids(2, n), num_beams=3, num_return_sequences=2),
    "padded": _padded,
    "streamed": _streamed,
    "chat": lambda pair, n: _chat(pair, n, DynamicCache(config=pair.model.config)),
    "chat, static": lambda pair, n: _chat(pair, n, StaticCache(config=pair.model.config, max_cache_len=48)),
    "static": lambda pair, n: pair(ids(2, n), cache_implementation="static"),
    "static, beams": lambda pair, n: pair(ids(2, n), cache_implementation="static", num_beams=2),
    "no cache": lambda pair, n: pair(ids(2, n), use_cache=False, max_new_tokens=4),
    "assisted": lambda pair, n: pair(ids(1, n), assistant_model=pair.draft),
    "prompt lookup": lambda pair, n: pair(ids(1, n).repeat(1, 3), prompt_lookup_num_tokens=2),
    "in chunks": lambda pair, n: pair(ids(2, 2 * n), prefill_chunk_size=8),
    "embeddings": lambda pair, n: pair(
        None, inputs_embeds=pair.model.get_input_embeddings()(ids(2, n)), max_new_tokens=4
    ),
    "inference mode": _inference,
    "threads": _threads,
}
# An empty cache and a full one, many new tokens and one, a mask and none: each is another graph of a model.
MOST_GRAPHS = 7
# What one family shows for all.
ONCE = (
    "one sequence",
    "streamed",
    "static, beams",
    "in chunks",
    "embeddings",
    "inference mode",
    "threads",
    "no cache",
)


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    """Nothing: what is captured of a family serves all of its tests."""


@pytest.fixture(scope="module")
def pairs() -> Iterator[Callable[[str], tuple[Pair, Pair]]]:
    """A family's models as they are, and optimized."""

    @functools.cache
    def made(name: str) -> tuple[Pair, Pair]:
        model = _family(name)
        return Pair(model, optimized=False), Pair(model, optimized=True)

    yield made
    torch._dynamo.reset()


CASES = [(name, mode) for name in FAMILIES for mode in MODES if name == "llama" or mode not in ONCE]


@pytest.mark.filterwarnings("error:opsmith")
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_tokens_are_eagers_and_what_was_captured_serves(pairs: Any, name: str, mode: str) -> None:
    eager, ours = pairs(name)
    generate = MODES[mode]
    counts, fallbacks = [ours.captured], ours.model.opsmith.report.fallbacks
    for length in (7, 11, 9, 9):
        assert torch.equal(generate(ours, length), generate(eager, length)), f"a prompt of {length}"
        counts.append(ours.captured)
    assert counts[-1] - counts[0] <= MOST_GRAPHS * (1 + (mode == "assisted")), counts
    assert not ours.model.opsmith.unread
    if "static" not in mode:  # all other caches are served from pages
        assert ours.model.opsmith.report.fallbacks == fallbacks
    if (
        mode == "threads"
    ):  # which see other threads' guards fail now and then, so that PyTorch captures once more
        return
    # How many drafts are accepted decides which sizes there are: another text may bring new ones.
    known = -2 if mode in ("assisted", "prompt lookup") else 1
    assert counts[known:] == [counts[-1]] * len(counts[known:]), counts
