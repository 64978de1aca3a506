"""What `generate` will ask of a model, asked ahead of time: so that nobody waits in its first call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opsmith.compiler.choose.select import Selector
from opsmith.compiler.progress import show

_FIELDS = {"prompt": (512, 512), "batch": (1, 1), "new_tokens": 4}


@dataclass(frozen=True)
class Warmup:
    """The sizes to generate at: the least and the most tokens of a prompt and sequences of a batch; tokens to add."""

    prompt: tuple[int, int]
    batch: tuple[int, int]
    new_tokens: int

    @classmethod
    def parse(cls, given: Any) -> Warmup:
        """A warmup from a dictionary; what it leaves out is a prompt of 512, one sequence, 4 tokens.

        Raises:
            TypeError, ValueError: for another form, an unknown field, or sizes below one.
        """
        if not isinstance(given, Mapping):
            raise TypeError(
                'optimize: warmup must be a dictionary such as {"prompt": (1, 512), "new_tokens": 4, "batch": (1, 4)}, '
                f"got {type(given).__name__}"
            )
        for name in given:
            if name not in _FIELDS:
                raise ValueError(
                    f"optimize: warmup has no field {name!r}; the fields are {', '.join(_FIELDS)}"
                )
        values = {**_FIELDS, **given}
        tokens = values["new_tokens"]
        if not _is_size(tokens):
            raise ValueError(f"optimize: warmup: new_tokens must be a number of at least 1, got {tokens!r}")
        return cls(_ends("prompt", values["prompt"]), _ends("batch", values["batch"]), tokens)

    def calls(self) -> list[tuple[int, int]]:
        """The batch and the prompt of each call, the largest first: its graph serves the smaller ones too."""
        every = set(itertools.product(self.batch, self.prompt))
        return sorted(every, key=lambda call: (call[0] * call[1], call[0]), reverse=True)

    def run(self, model: nn.Module, selector: Selector) -> Iterator[str]:
        """Generate at each of the sizes on random tokens; those that the time was too short for, by name.

        The first two tokens are examples: what computes a prompt and a token is measured and proved there. The rest
        show that caches grow, and get the program for that.
        """
        for batch, length in self.calls():
            name = f"a batch of {batch} with a prompt of {length}"
            for examples, tokens in ((True, min(2, self.new_tokens)), (False, self.new_tokens)):
                if selector.spent:
                    yield name
                    break
                show(f"warming up: {name}, {tokens} tokens")
                selector.learning = examples
                _generate(model, batch, length, tokens)


def _generate(model: Any, batch: int, length: int, tokens: int) -> None:
    config = model.config.get_text_config()
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (batch, length), generator=random).to(model.device)
    # Every sequence goes on to the last token, whatever would end it.
    exactly = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **exactly)


def check(model: nn.Module) -> None:
    """Make sure that there is something to warm up.

    Raises:
        ValueError: for a model that does not generate.
    """
    able = getattr(model, "can_generate", None)
    if not callable(able) or not able():
        raise ValueError(
            f"optimize: warmup is for models that generate, and {type(model).__name__} does not; "
            "give example_inputs for each size instead"
        )


def _ends(name: str, value: Any) -> tuple[int, int]:
    ends = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(ends) != 2 or not all(map(_is_size, ends)) or ends[0] > ends[1]:
        raise ValueError(
            f"optimize: warmup: {name} must be a number of at least 1, or the least and the most, got {value!r}"
        )
    return ends


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 1
