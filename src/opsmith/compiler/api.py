"""`optimize`, `restore` and the `torch.compile` backend: the compiler's face."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import opsmith.ops  # noqa: F401  the cards register themselves
from opsmith import measure
from opsmith.compiler.capture.shards import is_gathered
from opsmith.compiler.choose.ranks import Ranks
from opsmith.compiler.config import DTYPES, Config
from opsmith.compiler.copying import OURS, Copier
from opsmith.compiler.entry import Entry
from opsmith.compiler.modules.calibrate import calls_of
from opsmith.compiler.modules.embeddings import embed
from opsmith.compiler.modules.linear_layers import tensors
from opsmith.compiler.plan import Plan
from opsmith.compiler.progress import show
from opsmith.compiler.reasons import one_line
from opsmith.compiler.session import Session
from opsmith.compiler.warmup import Warmup, check
from opsmith.measure.pages import Read
from opsmith.measure.pool import tensors_of
from opsmith.ops.packed_linear.formats import CHOICES
from opsmith.ops.rounding import KeepsDtypes


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="opsmith")`; `options` are the fields of `Config`.

    >>> fast = torch.compile(model, backend="opsmith")
    """
    config = Config.parse(options.get("options", options) or {}, "torch.compile options")
    if config.dtype is not None or config.device is not None or config.quantize is not None:
        raise ValueError("torch.compile: only opsmith.optimize changes a model's dtype, device or weights")
    if config.frozen:  # a backend is asked when Dynamo has chosen its guards
        raise ValueError(
            "torch.compile options: frozen is chosen beside the backend's own options: "
            'options={"guard_filter_fn": opsmith.keep_input_guards}'
        )
    return Session(config).backend(gm, example_inputs)


@measure.no_collection()
def optimize(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    config: Config | str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    quantize: str | None = None,
    plan: Plan | str | Path | None = None,
    verify: bool = True,
    warmup: Mapping[str, Any] | None = None,
    budget: float | None = None,
    calibration: Any = None,
) -> nn.Module:
    """Make a model faster in place: recognize its operators, choose the fastest implementations, prove each.

    The class, `state_dict`, `generate` and `save_pretrained` stay as they are; `opsmith.restore(model)` undoes
    everything. `model.opsmith.plan` and `model.opsmith.report` say what was done. Weights may change afterwards
    (training, `load_state_dict`, `to`); only a change that PyTorch itself does not count, in place through `.data`,
    has to be followed by another `optimize`.

    >>> model = opsmith.optimize(model, {"input_ids": ids, "attention_mask": mask})
    >>> print(model.opsmith.plan)

    Args:
        model: any `nn.Module`.
        example_inputs: a dictionary of keyword arguments, a tuple of positional ones or one tensor; or a list of
            such, one for each shape to tune for. None: the first real call is the example.
        config: a `Config`, or the path of an `opsmith.toml`.
        dtype: run in this dtype (`torch.bfloat16` or "bfloat16"); the originals come back with `restore`.
        quantize: "bf16", "int8", "int8_dynamic" or "int4": every linear layer computes with a packed weight, its own
            as it is now. What rounding took from each is in the report. `state_dict` keeps the originals.
        plan: a plan, or the path of a saved one, whose choices are taken over.
        verify: prove every site on the example inputs against float64, and roll back what fails; what passed on these
            inputs and weights before, by this code, is not proved again.
        warmup: sizes at which `generate` is called ahead, on random tokens, so that its first call captures nothing:
            `{"prompt": (1, 512), "new_tokens": 4, "batch": (1, 4)}`, each a number or the least and the most.
        budget: seconds for all this. Once they are spent no step begins, and the rest runs as it was; the report says
            what. What has begun is finished.
        calibration: of "int4", what weights are rounded for: a text, ids `[tokens]`, a dictionary of inputs, or a list
            of such; some thousand tokens of what the model is used for. Layers' results then change least on these.

    Returns:
        The same model.

    Raises:
        TypeError, ValueError: for what is no model, or inputs that it does not accept; the model is untouched.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize: model must be a torch.nn.Module, got {type(model).__name__}")
    started = time.monotonic()
    settings = _settings(config, dtype, quantize, verify)
    saved = Plan.load(plan) if isinstance(plan, str | Path) else plan
    calls = _calls(example_inputs)
    warm = None if warmup is None else Warmup.parse(warmup)
    if warm is not None:
        check(model)
    if budget is not None and not budget > 0:
        raise ValueError(f"optimize: budget must be a number of seconds above 0, got {budget!r}")
    if saved is not None and not isinstance(saved, Plan):
        raise TypeError(f"optimize: plan must be an opsmith.Plan or a path, got {type(saved).__name__}")
    read = None if calibration is None else calls_of(model, calibration)
    if read is not None and "int4" not in (settings.quantize, *settings.quantize_formats.values()):
        raise ValueError(
            'optimize: calibration is what int4 weights are rounded for; say quantize="int4", or leave it out'
        )
    ranks, gathered = Ranks.of(model), is_gathered(model)
    if ranks is not None:
        given = {"example_inputs": calls, "calibration": read}
        asked = {n: [] if gathered else [list(t.shape) for t in tensors_of(one)] for n, one in given.items()}
        settings = _together(ranks, settings, saved, asked | {"warmup": warmup, "budget": budget})
    # Ranks that gather weights learn from batches of their own: what is new to one of them is not to all.
    session = Session(settings, saved, read, None if gathered else ranks)
    restore(model)
    model.opsmith = session  # type: ignore[assignment]
    session.selector.learning = True
    session.selector.deadline = math.inf if budget is None else started + budget
    try:
        if settings.device is not None:
            model.to(settings.device)
        if settings.torch_dtype is not None:
            session.before = {}
            _cast(model, settings.torch_dtype, session.before)
        session.gathers(model)
        session.packing.adopt(model)
        taken = session.latent.find(model)
        session.mixtures.take(model, settings.verify, ranks)
        model._compiled_call_impl = Entry(model, session).call
        model.__dict__["__deepcopy__"] = Copier(model, _like)
        if settings.quantize is not None:
            session.packing.pack(model, settings, taken, session.calibration)
        if settings.quantize_embedding:
            embed(session.packing, model, settings.quantize_skip)
        layers = [m for m in model.modules() if isinstance(m, nn.Linear) and "forward" not in vars(m)]
        session.unpacked = sum(layer.weight.nbytes for layer in layers)
        session.dtypes = {layer.weight.dtype for layer in layers}
        session.adjacent.of(model)
        show("capturing the model")
        for args, kwargs in calls:
            if settings.quantize is not None and settings.verify:
                session.packing.check(partial(model._call_impl, *args, **kwargs), ranks)
            with torch.no_grad():
                model(*args, **kwargs)
        if warm is not None:
            session.skipped = list(warm.run(model, session.selector))
        if calls and not session.graphs and not session.unread:
            why = next(iter(session.breaks.values()), "TORCH_LOGS=graph_breaks says why")
            said = f"optimize: PyTorch made no graph of this model, which is as it was: {why}"
            raise RuntimeError(f"{said}; optimize the modules that it calls, each by itself")
    except BaseException as error:
        restore(model)
        # Ctrl-C; and ranks whose model eager would run again on this one alone, in step with nobody.
        if not isinstance(error, Exception) or ranks is not None:
            raise
        if problem := _eager_problem(model, calls):
            raise ValueError(f"optimize: the model does not accept the example inputs: {problem}") from error
        if settings.dtype is not None and "dtype" in str(error):
            raise ValueError(
                f"optimize: in {settings.dtype} the model does not accept the example inputs: {one_line(error)}; "
                f"cast them to {settings.dtype}"
            ) from error
        raise
    finally:
        session.selector.learning, session.selector.deadline = False, math.inf
        show()
        measure.trim()
    if settings.quantize_release:
        session.packing.release(model)
        for name, tensor in tensors(model).items():
            if tensor.is_meta:
                (session.before or {}).pop(name, None)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Give a model back as it was before `optimize`; a model that was not optimized is left alone.

    >>> opsmith.restore(model)

    Raises:
        ValueError: where weights were given back to the system (`quantize_release`); the model stays optimized.
    """
    session = getattr(model, "opsmith", None)
    if not isinstance(session, Session):
        return model
    session.packing.refuse("restore")
    for name in OURS:
        model.__dict__.pop(name, None)
    session.close()
    own = tensors(model) if session.before else {}
    for name, tensor in (session.before or {}).items():
        own[name].data = tensor
    return model


def _like(model: nn.Module, session: Session) -> nn.Module:
    """A copy of an optimized model, optimized as that one is."""
    optimize(model, config=session.config, plan=session.plan, calibration=session.calibration)
    if session.before is not None:
        model.opsmith.before = copy.deepcopy(session.before)  # type: ignore[union-attr]
    return model


def _settings(
    config: Config | str | Path | None, dtype: torch.dtype | str | None, quantize: str | None, verify: bool
) -> Config:
    settings = Config.load(config) if isinstance(config, str | Path) else config or Config()
    if not isinstance(settings, Config):
        raise TypeError(f"optimize: config must be an opsmith.Config or a path, got {type(config).__name__}")
    changes: dict[str, Any] = {} if verify else {"verify": False}
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise ValueError(f"optimize: dtype must be one of {', '.join(DTYPES)}, got {dtype}")
        changes["dtype"] = name
    if quantize is not None:
        if quantize not in CHOICES:
            raise ValueError(f"optimize: quantize must be one of {', '.join(CHOICES)}, got {quantize!r}")
        changes["quantize"] = quantize
    settings = settings.model_copy(update=changes)
    if settings.quantize_formats and settings.quantize is None:
        raise ValueError("optimize: quantize_formats names the formats of some layers; say quantize too")
    if settings.quantize_embedding and settings.quantize is None:
        raise ValueError('optimize: quantize_embedding goes with quantize; set quantize="int8" as well')
    return settings


def _together(ranks: Ranks, settings: Config, plan: Plan | None, asked: Mapping[str, Any]) -> Config:
    """The settings under which the ranks of a sharded model choose alike: nothing may hang on one rank's clock."""
    said = {f"the setting {name}": repr(value) for name, value in (*settings, *asked.items())}
    said["the plan"] = "none" if plan is None else hashlib.sha256(plan.to_json().encode()).hexdigest()
    ranks.check(said)
    if asked["budget"] is not None:
        raise ValueError("optimize: a sharded model takes no budget: each of its ranks has another clock")
    return settings.model_copy(update={"inductor": False})


Call = tuple[tuple[Any, ...], dict[str, Any]]


def call_of(one: Any) -> Call | None:
    """The arguments that an example input stands for; None for what is no example input."""
    if isinstance(one, Mapping):
        return (), dict(one)
    if isinstance(one, tuple):
        return one, {}
    return ((one,), {}) if isinstance(one, Tensor) else None


def _calls(example_inputs: Any) -> list[Call]:
    if example_inputs is None:
        return []
    several = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    calls: list[Call] = []
    for one in several:
        if (call := call_of(one)) is None:
            raise TypeError(
                "optimize: example_inputs must be a tensor, a tuple, a dictionary, or a list of these, "
                f"got {type(one).__name__}"
            )
        calls.append(call)
    # The largest first: the graph that it is captured as serves a batch of one too, and not the other way round.
    return sorted(calls, key=lambda call: sum(t.numel() for t in tensors_of(call)), reverse=True)


def _cast(model: nn.Module, dtype: torch.dtype, before: dict[str, Tensor]) -> None:
    """Cast the floating-point parameters and buffers; what they were is kept in `before`, for `restore`."""
    read = Read()
    rounded = (m for m in model.modules() if isinstance(m, KeepsDtypes))
    kept = {id(m._buffers.get(name)) for m in rounded for name in m.kept}
    for name, tensor in tensors(model).items():
        if tensor.is_floating_point() and tensor.dtype != dtype and id(tensor) not in kept:
            before[name] = tensor.data
            tensor.data = tensor.data.to(dtype)
            read.add(before[name])
    read.give_back()


def _eager_problem(model: nn.Module, calls: list[Call]) -> str | None:
    """What eager says of the example inputs, when it does not take them either."""
    for args, kwargs in calls:
        try:
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception as error:  # any exception of a user's model is the answer here
            return one_line(error)
    return None
