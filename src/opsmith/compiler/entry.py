"""How a call reaches an optimized model's graphs: through Dynamo, under the settings with which these are captured."""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.callback import CallbackArgs, callback_handler

from opsmith import measure
from opsmith.call.dispatch import carries_tangents
from opsmith.compiler.code import Code
from opsmith.compiler.frozen import keep_input_guards
from opsmith.compiler.modules.conventions import rehearse
from opsmith.compiler.modules.quantize import needed
from opsmith.compiler.program.graph import Apart
from opsmith.compiler.progress import show
from opsmith.compiler.session import Part, Session
from opsmith.decoding import NoState


def entry(model: nn.Module, session: Session) -> Callable[..., Any]:
    """The model's call through Dynamo: sizes dynamic from the start, except what belongs to the model.

    An epsilon or a dropout rate is part of the model: as an input it would hide the arithmetic. So are, until they
    vary, the length of a feature vector (the last dimension of a floating-point input) and the sizes of an image;
    formulas of windows of any height take Dynamo half a minute.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        # A frame of our own, not done with the call: Dynamo begins and goes on at none of PyTorch's, as a model may be.
        result = model._call_impl(*args, **kwargs)
        return result

    # Dynamo builds its guards twice where somebody chooses among them.
    whole = any(isinstance(m, _LAYERS) for m in model.modules())
    packed = session.config.quantize or session.packing.adopted
    chosen = keep_input_guards if session.config.frozen else needed if packed or whole else None
    options: Any = chosen and {"guard_filter_fn": chosen}
    begin = partial(torch.compile, backend=_backend(session), dynamic=True, options=options, **_UNLIMITED)
    compiled: Any = None
    seen: dict[tuple[Any, ...], Callable[..., Any]] = {}
    own: set[tuple[Any, ...]] = set()  # calls, at any size, that the model's own code answers
    captures: defaultdict[tuple[Any, ...], set[Any]] = defaultdict(set)  # by the same, at which sizes
    first: dict[tuple[Any, ...], int] = {}  # by call, argument and axis, the first size seen
    general = True  # until a graph of this model turns out not to be

    def call(*args: Any, **kwargs: Any) -> Any:
        session.packing.follow()
        if model.training and torch.is_grad_enabled():
            session.packing.train()
        # Nothing may be made of weights that are gone after the call, and whose changes PyTorch does not count.
        gathered = session.gathers(model) and not torch.is_grad_enabled()
        if gathered or torch.compiler.is_exporting() or carries_tangents() or session.changed():
            with session.paged.lock:
                return model._call_impl(*args, **kwargs)
        if session.latent.waiting:
            session.latent.study(model, partial(rehearse, model, args, kwargs))
        served = session.latent if session.latent.sites else session.paged
        return served.call(model, args, kwargs, captured)

    def captured(*args: Any, **kwargs: Any) -> Any:
        nonlocal general, compiled
        values = (*args, *kwargs.values())
        tensors = [v for v in values if isinstance(v, Tensor)]
        one = next(model.parameters(), None)  # all of them are cast, moved and frozen together, as a rule
        what = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            model.training,
            session.latent.switch.on,
            None if one is None else (one.dtype, one.device, one.requires_grad),
            *kwargs,
            *[v if v is None or isinstance(v, bool | str) else type(v) for v in values],
            *[(t.dtype, t.requires_grad) for t in tensors],
        )
        key = (*what, *[t.shape for t in tensors])
        plain = all(v is None or isinstance(v, _PLAIN) for v in values)
        session.capturing.parts.clear()
        if plain and (run := seen.get(key)) is not None:
            try:
                return run(*args, **kwargs)
            except torch._dynamo.exc.BackendCompilerFailed as failed:
                if not isinstance(failed.inner_exception, _Forgotten):
                    raise
                seen.clear()
        kind = (*what, *[tuple([n == 1 for n in t.shape]) for t in tensors])
        if kind in own:
            return model._call_impl(*args, **kwargs)
        # What stands in a cache, say, is not in the key, and may be what Dynamo captures a graph anew for.
        # Sizes not seen before may be captured anew, and only capturing asks for these settings.
        for i, t in enumerate(tensors):
            if t.is_floating_point() and t.dim() > 1:
                for axis in range(1 if t.dim() > 3 else t.dim() - 1, t.dim()):
                    if first.setdefault((what, i, t.dim(), axis), t.shape[axis]) == t.shape[axis]:
                        torch._dynamo.mark_static(t, axis)
        # Dynamo takes a size of one for a constant, so a graph captured with one is not for others.
        sizes, paged = [n for t in tensors for n in t.shape], any(isinstance(v, NoState) for v in values)
        many = any(n > 1 for n in sizes) if paged else all(n > 1 for n in sizes)
        for t in tensors if paged else ():
            if t.dim() and t.shape[0] == 1:  # positions of all sequences, say: to be broadcast
                torch._dynamo.mark_static(t, 0)
        session.capturing.general, session.capturing.paged = general and plain and many, paged
        session.capturing.ready = True
        before, started = len(session.parts), time.monotonic()
        # Dynamo gives up the frame of a call that fails, unless it is `sure` that there is no break to begin again at.
        sure = general and before > 0
        compiled = compiled if before else begin(_apart(forward))
        left: list[Exception] = []
        try:
            with _capturing(session.capturing.general, sure, left, whole):
                result = compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException:
            if not (session.capturing.general or sure):  # what ran before would run twice
                raise
            if sure and not model.training:  # a call without an answer ends here
                rehearse(model, args, kwargs)
            general = session.capturing.general = False
            with _capturing(False, False, left, whole):
                result = compiled(*args, **kwargs)
        finally:
            session.capturing.general = session.capturing.ready = False
        # Behind a break no graph is general, and the next time the one before the break may be there already.
        general = general and len(session.parts) <= before + 1
        for error in left:
            session.leave(error)
        if len(session.parts) > before:
            captures[kind].add(key)
            if len(captures[kind]) == _OFTEN and kind not in own:
                session.decline(f"captured at {_OFTEN} sizes: the model's own code runs at new ones")
                own.add(kind)
            session.code = Code(model)  # with what is new in it
            show()
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            took = type(model).__name__, shapes, time.monotonic() - started
            _LOG.info("captured and studied a call of %s on %s in %.1f s", *took)
        # Where Dynamo reads it, code may go another way, and a slower one: not for graphs that run as they were. To
        # capture other sizes would end alike, and some are captured each by itself.
        parts = [part for held in session.capturing.parts if (part := held()) is not None]
        if (parts or left) and all(part.left for part in parts):
            own.add(kind)
        elif plain:
            seen[key] = model._call_impl if left else compiled
        return result

    return call


def _backend(session: Session) -> Callable[..., Any]:
    """A session as Dynamo knows it. The model holds the session, and that its graphs: Dynamo keeps every backend and
    every graph that it was ever given, and would keep a model's weights with them.
    """
    known = weakref.ref(session)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        session = known()
        assert session is not None  # the model is being called, and holds it
        capturing = session.capturing
        if not capturing.ready and not capturing.parts:
            raise _Forgotten
        before = len(session.graphs)
        run = session.backend(gm, example_inputs)
        part = Part(run, run.graphs.values() if isinstance(run, Apart) else session.graphs[before:])
        session.parts.append(part)
        held = weakref.ref(part)

        def call(*args: Any) -> Any:
            capturing.parts.append(held)
            return held().run(*args)  # type: ignore[union-attr]

        return call

    return backend


# What a key says all of. A cache without state is always the same.
_PLAIN = (Tensor, bool, int, float, str, NoState)
_LAYERS = nn.TransformerEncoderLayer | nn.TransformerEncoder | nn.TransformerDecoder
_MANY = 1 << 16
_OFTEN = 8  # captures of a call at sizes that are numbers to Dynamo, as of a loop that it unrolls
# A size seen before may be captured anew too, after a change of the model; PyTorch 2.13 has a limit for each function.
_UNLIMITED: dict[str, Any] = (
    {"recompile_limit": _MANY} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
)
_LOG = logging.getLogger("opsmith")
_models = itertools.count()


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with code and globals that are no other model's: Dynamo keeps graphs by code, looks through all of
    those, and stops capturing where they became too many; what it made of the code it keeps among the globals.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_models)}")
    own = {name: function.__globals__[name] for name in ("__name__", "__builtins__")}
    return FunctionType(code, own, code.co_name, None, function.__closure__)


class _Forgotten(Exception):
    """Dynamo captures again what it had captured, as after torch.compiler.reset(), and without the settings for it."""


@contextmanager
def _capturing(general: bool, sure: bool, left: list[Exception], whole: bool) -> Iterator[None]:
    """The settings under which a graph is captured.

    Recompilations are no sign of trouble here: there is one for each kind of sizes. Sizes that are
    equal in the example (a cache as long as a stride) may differ in the next call, unless the model says otherwise.
    A `general` graph serves sizes of one too, a batch of one above all, unless the model asks for such a size. What
    fails in that is captured otherwise; what fails then, or behind a break of the graph, runs in eager PyTorch, which
    Dynamo says to its logger alone: it is `left`. No break comes where that is `sure`. Its advice at one by `.item()`
    would have it capture less. Layers that are one operator as a `whole` to PyTorch, where nothing learns, are captured
    by their parts. Python's garbage collector would look through all objects of all libraries, a tenth of the time.
    """

    def hear(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        ours = record.levelno >= logging.WARNING and record.thread == threading.get_ident()
        if ours and isinstance(error, Exception):
            left.append(error)
        return not ours or (error is None and not record.name.endswith("variables.tensor"))

    def begins(_: CallbackArgs) -> None:
        show("capturing the model")

    with (
        measure.no_collection(),
        torch._dynamo.error_on_graph_break(sure),
        torch._dynamo.config.patch(
            suppress_errors=not (general or sure),
            specialize_float=True,
            recompile_limit=_MANY,
            accumulated_recompile_limit=_MANY,
            run_gc_after_compile=False,
            # Behind a break Dynamo begins at no frame of PyTorch's layers; with hooks set there, this fails in 2.13.
            nested_graph_breaks=whole,
        ),
        torch.fx.experimental._config.patch(  # type: ignore[attr-defined]
            use_duck_shape=False, backed_size_oblivious=general
        ),
        ExitStack() as stack,
    ):
        for name in ("convert_frame", "variables.tensor"):
            logger = logging.getLogger(f"torch._dynamo.{name}")
            logger.addFilter(hear)
            stack.callback(logger.removeFilter, hear)
        callback_handler.register_start_callback(begins)
        stack.callback(callback_handler.remove_start_callback, begins)
        if whole and torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, True)
        yield
