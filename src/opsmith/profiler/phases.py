"""The phases of a model: what one repetition of each does, and what is put back after it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from opsmith.profiler.collect import Watched

PHASES = ("forward", "prefill", "decode", "backward", "train")


def _nothing() -> None:
    return None


@dataclass
class Work:
    """One phase: `before`, then `run`, which is timed, then `after`.

    Attributes:
        traced, args, kwargs: the call whose graph says which operators there are; `fresh` gives arguments that a call
            changes, anew.
        tokens, facts: what the arguments say of the example.
        shaped: the repetition that knows shapes, also where it stopped half way.
    """

    name: str
    run: Callable[[], Any]
    traced: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Callable[[], None] = _nothing
    after: Callable[[], None] = _nothing
    ready: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    fresh: Callable[[], dict[str, Any]] | None = None
    cache_bytes: int = 0
    tokens: int = field(init=False)
    facts: dict[str, float] = field(init=False)
    shaped: Watched | None = None

    def __post_init__(self) -> None:
        self.tokens, self.facts = _tokens(self.args, self.kwargs), _facts(self.args, self.kwargs)


def phase_of(name: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """The work of a phase.

    Raises:
        ValueError: for a phase that this model does not have.
    """
    if name == "decode":
        return _decode(model, args, kwargs)
    if name in ("backward", "train"):
        return _training(name, model, args, kwargs)
    if name == "prefill" and _takes(model, "use_cache"):
        kwargs = {"use_cache": True, **kwargs}

    def run() -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    own = run if isinstance(model, nn.Module) else lambda: model(*args, **kwargs)
    close = _kept(model) if isinstance(model, nn.Module) and model.training else _nothing
    return Work(name, own, model, args, kwargs, close=close)


def _kept(model: nn.Module) -> Callable[[], None]:
    """What puts gradients, modes and buffers back as they are now: repetitions add to them."""
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    own = [(m, name, b, b.detach().clone()) for m, _ in modes for name, b in m.named_buffers(recurse=False)]

    @torch.no_grad()
    def put_back() -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, value in own:
            setattr(module, name, buffer)
            if not torch.equal(buffer, value):  # a graph of the caller's may need what was not written
                buffer.copy_(value)

    return put_back


def _decode(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """One token for each sequence, on the cache that the example leaves; the cache is cut back after each."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    refusal = ValueError(
        "profile: decode needs a model that takes input_ids and past_key_values; give your own step to "
        "opsmith.profile as a callable"
    )
    if not _takes(model, "past_key_values") or not isinstance(ids, Tensor):
        raise refusal
    state: dict[str, Any] = {}
    step = ids[:, -1:]
    work = Work("decode", _nothing, model, (), {"input_ids": step})

    def filled() -> Any:
        with torch.no_grad():
            return getattr(model(input_ids=ids, use_cache=True), "past_key_values", None)

    def arguments() -> dict[str, Any]:
        return {"input_ids": step, "past_key_values": filled(), "use_cache": True}

    def ready() -> None:
        state["cache"] = filled()
        if state["cache"] is None:  # an encoder whose class could be a decoder
            raise refusal
        n = state["length"] = state["cache"].get_seq_length()
        if n >= (getattr(getattr(model, "config", None), "max_position_embeddings", None) or n + 1):
            raise ValueError(f"profile: the {n} tokens leave decode no position in this model; give it fewer")
        held = (t for layer in getattr(state["cache"], "layers", None) or () for t in vars(layer).values())
        work.cache_bytes = bytes_of(t for t in held if isinstance(t, Tensor))

    def run() -> Any:
        with torch.no_grad():
            return model(input_ids=step, past_key_values=state["cache"], use_cache=True)

    def after() -> None:
        if state:
            # Hugging Face counts what to remove as a negative number.
            state["cache"].crop(state["length"] - state["cache"].get_seq_length())

    work.run, work.ready, work.after, work.fresh = run, ready, after, arguments
    return work


def _training(name: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """Forward, loss and gradients; for "backward" the forward pass is not timed. No weight changes."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"profile: {name} needs a module; for a training step of your own leave phase out, or use the context "
            "manager"
        )
    if _takes(model, "labels") and "labels" not in kwargs:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor):
            kwargs = {**kwargs, "labels": ids}
    if _takes(model, "use_cache"):
        kwargs = {"use_cache": False, **kwargs}
    state: dict[str, Any] = {}

    def loss() -> Tensor:
        output = model(*args, **kwargs)
        found = getattr(output, "loss", None)
        if isinstance(found, Tensor):
            return found
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if not tensors:
            raise ValueError(f"profile: {name} needs a result that has a gradient, and this model gives none")
        return tensors[0] if tensors[0].dim() == 0 else tensors[0].float().mean()

    def before() -> None:
        model.train()
        after()  # the gradients that are there are the caller's, and autograd would add to them
        if name == "backward":
            state["loss"] = loss()

    def run() -> Any:
        (state.pop("loss") if name == "backward" else loss()).backward()

    def after() -> None:
        state.pop("loss", None)
        model.zero_grad(set_to_none=True)

    return Work(name, run, model, args, kwargs, before=before, after=after, close=_kept(model))


def _takes(model: Any, argument: str) -> bool:
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _ids(args: Iterable[Any], kwargs: dict[str, Any]) -> Tensor | None:
    named = kwargs.get("input_ids")
    if isinstance(named, Tensor):
        return named
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool:
            return value
    return None


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens of an example: its integers, or the rows of `[batch, tokens, width]`; none of an image."""
    ids = _ids(args, kwargs)
    if ids is not None:
        return ids.numel()
    first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
    return first.numel() // max(first.shape[-1], 1) if first is not None and first.dim() == 3 else 0


def _facts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """What the rules of the advice ask about the example: how much of it is padding, how many sequences."""
    facts: dict[str, float] = {}
    ids = _ids(args, kwargs)
    if ids is not None and ids.dim():
        facts["sequences"] = float(ids.shape[0])
    mask = next((v for k, v in kwargs.items() if "mask" in k and isinstance(v, Tensor)), None)
    if mask is None:
        mask = next((v for v in args if isinstance(v, Tensor) and v.dtype == torch.bool), None)
    if mask is not None and mask.dim() == 2 and not mask.is_floating_point():
        facts["padding"] = 1.0 - float(mask.bool().float().mean())
    facts["threads"] = float(torch.get_num_threads())
    return facts


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory behind tensors, what is shared counted once."""
    seen: dict[int, int] = {}
    for t in tensors:
        storage = t.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
