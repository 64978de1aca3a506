"""How a call reaches an optimized model's graphs: through Dynamo, under the settings with which these are captured."""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from opsmith.compiler.modules import conventions
from opsmith.compiler.modules.conventions import rehearse
from opsmith.compiler.modules.quantize import needed
from opsmith.compiler.program.graph import Apart
from opsmith.compiler.progress import show
from opsmith.compiler.reasons import broken
from opsmith.compiler.session import Part, Session
from opsmith.decoding import NoState

Kind = tuple[Any, ...]  # of a call


class Entry:
    """How calls reach one model's graphs: sizes are dynamic from the start, except what belongs to the model.

    An epsilon or a dropout rate is part of the model: as an input it would hide the arithmetic. So are, until they
    vary, the length of a feature vector (the last dimension of a floating-point input) and the sizes of an image;
    formulas of windows of any height take Dynamo half a minute.
    """

    def __init__(self, model: nn.Module, session: Session):
        self.model, self.session = model, session
        # Dynamo builds its guards twice where somebody chooses among them.
        self.whole = any(isinstance(m, _LAYERS) for m in model.modules())
        packed = session.config.quantize or session.packing.adopted
        chosen = keep_input_guards if session.config.frozen else needed if packed or self.whole else None
        self.options: Any = chosen and {"guard_filter_fn": chosen}
        self.compiled: Any = None
        self.general = True  # until a graph of this model turns out not to be
        self.seen: dict[Kind, Callable[..., Any]] = {}  # by call and all its sizes, what answers it
        self.own: set[Kind] = set()  # calls, at any size, that the model's own code answers
        self.captures: defaultdict[Kind, set[Kind]] = defaultdict(set)  # by the same, at which sizes
        self.first: dict[Kind, int] = {}  # by call, argument and axis, the first size seen

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's call."""
        model, session = self.model, self.session
        if not session.bypass.enter(conventions.loop()) and self._changed():
            with session.paged.lock:
                return model._call_impl(*args, **kwargs)
        if session.latent.waiting:
            session.latent.study(model, partial(rehearse, model, args, kwargs))
        served = session.latent if session.latent.sites else session.paged
        return served.call(model, args, kwargs, self.captured)

    def _changed(self) -> bool:
        """Whether the model's own code has to answer; packed weights follow what they were packed of."""
        model, session = self.model, self.session
        session.packing.follow()
        if model.training and torch.is_grad_enabled():
            session.packing.train()
        # Nothing may be made of weights that are gone after the call, and whose changes PyTorch does not count.
        gathered = session.gathers(model) and not torch.is_grad_enabled()
        return gathered or torch.compiler.is_exporting() or carries_tangents() or session.changed()

    def captured(self, *args: Any, **kwargs: Any) -> Any:
        """The call by a graph, which is captured where there is none for it yet."""
        values = (*args, *kwargs.values())
        tensors = [v for v in values if isinstance(v, Tensor)]
        what = self._what(values, kwargs, tensors)
        key = (*what, *[t.shape for t in tensors])
        plain = all(v is None or isinstance(v, _PLAIN) for v in values)
        capturing = self.session.capturing
        capturing.parts.clear()
        if plain and (run := self.seen.get(key)) is not None:
            bypass = self.session.bypass
            if (result := bypass.call(key, values)) is not None:
                return result
            try:
                # After a change of the model Dynamo captures here, without the settings for it: it must not succeed.
                with torch._dynamo.error_on_graph_break(self.general and run is self.compiled):
                    return bypass.learn(self.model, key, values, partial(run, *args, **kwargs))
            except torch._dynamo.exc.TorchDynamoException as failed:
                if not isinstance(getattr(failed, "inner_exception", _Forgotten()), _Forgotten):
                    raise
                self.seen.clear()
        kind = (*what, *[tuple([n == 1 for n in t.shape]) for t in tensors])
        if kind in self.own:
            return self.model._call_impl(*args, **kwargs)
        # What stands in a cache, say, is not in the key, and may be what Dynamo captures a graph anew for.
        paged = any(isinstance(v, NoState) for v in values)
        many = self._mark(what, tensors, paged)
        capturing.general, capturing.paged = self.general and plain and many, paged
        before, started = len(self.session.parts), time.monotonic()
        left: list[Exception] = []
        result = self._run(args, kwargs, left)
        if len(self.session.parts) > before:
            self.captures[kind].add(key)
            if len(self.captures[kind]) == _OFTEN and kind not in self.own:
                self.session.decline(f"captured at {_OFTEN} sizes: the model's own code runs at new ones")
                self.own.add(kind)
            self.session.code = Code(self.model)  # with what is new in it
            show()
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            took = type(self.model).__name__, shapes, time.monotonic() - started
            _LOG.info("captured and studied a call of %s on %s in %.1f s", *took)
        # Where Dynamo reads it, code may go another way, and a slower one: not for graphs that run as they were. To
        # capture other sizes would end alike, and some are captured each by itself.
        parts = [part for held in capturing.parts if (part := held()) is not None]
        if (parts or left) and all(part.left for part in parts):
            self.own.add(kind)
        elif plain:
            self.seen[key] = self.model._call_impl if left else self.compiled
        return result

    def _what(self, values: Sequence[Any], names: Iterable[str], tensors: Sequence[Tensor]) -> Kind:
        """All that Dynamo captures anew for, but sizes."""
        # All parameters are cast, moved and frozen together, as a rule.
        one = next(self.model.parameters(), None)
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            self.model.training,
            self.session.latent.switch.on,
            None if one is None else (one.dtype, one.device, one.requires_grad),
            *names,
            *[v if v is None or isinstance(v, bool | str) else type(v) for v in values],
            *[(t.dtype, t.requires_grad) for t in tensors],
        )

    def _mark(self, what: Kind, tensors: Sequence[Tensor], paged: bool) -> bool:
        """Have sizes that belong to the model captured as numbers; whether the graph may then serve sizes of one too,
        which Dynamo takes for a constant where it captures them.
        """
        for i, t in enumerate(tensors):
            if t.is_floating_point() and t.dim() > 1:
                for axis in range(1 if t.dim() > 3 else t.dim() - 1, t.dim()):
                    if self.first.setdefault((what, i, t.dim(), axis), t.shape[axis]) == t.shape[axis]:
                        torch._dynamo.mark_static(t, axis)
        for t in tensors if paged else ():
            if t.dim() and t.shape[0] == 1:  # positions of all sequences, say: to be broadcast
                torch._dynamo.mark_static(t, 0)
        sizes = [n for t in tensors for n in t.shape]
        return any(n > 1 for n in sizes) if paged else all(n > 1 for n in sizes)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], left: list[Exception]) -> Any:
        """The call through Dynamo, which captures what is new in it; what it could not read is `left`."""
        capturing, before = self.session.capturing, len(self.session.parts)
        # Dynamo gives up the frame of a call that fails, unless it is `sure` that there is no break to begin again at.
        sure = self.general and before > 0
        self.compiled = self.compiled if before else self._begin()
        capturing.ready, known = True, torch._dynamo.utils.counters["graph_break"].copy()
        try:
            with _capturing(capturing.general, sure, left, self.whole):
                result = self.compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException:
            if not (capturing.general or sure):  # what ran before would run twice
                raise
            if sure and not self.model.training:  # a call without an answer ends here
                rehearse(self.model, args, kwargs)
            self.general = capturing.general = False
            with _capturing(False, False, left, self.whole):
                result = self.compiled(*args, **kwargs)
        finally:
            capturing.general = capturing.ready = False
        # Within a loop no graph ends: Dynamo leaves the frame.
        for why in map(broken, torch._dynamo.utils.counters["graph_break"] - known):
            if why not in self.session.breaks.values():
                self.session.breaks.setdefault(type(self.model).__name__, why)
        # Behind a break no graph is general, and the next time the one before the break may be there already.
        self.general = self.general and len(self.session.parts) <= before + 1
        for error in left:
            self.session.leave(error)
        return result

    def _begin(self) -> Callable[..., Any]:
        model = self.model

        def forward(*args: Any, **kwargs: Any) -> Any:
            # A frame of our own, not done with the call: Dynamo takes none of PyTorch's, which a model's may be.
            result = model._call_impl(*args, **kwargs)
            return result

        backend, options = _backend(self.session), self.options
        return torch.compile(_apart(forward), backend=backend, dynamic=True, options=options, **_UNLIMITED)


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
            run = held().run  # type: ignore[union-attr]
            made = run(*args)
            known().bypass.saw(run, args, made)  # type: ignore[union-attr]
            return made

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

    # A logger's methods that say each message once, as transformers adds them: at a message a graph would break.
    said_once = {method for method in vars(logging.Logger).values() if hasattr(method, "cache_info")}
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
            # What a checkpointed layer notes, or a hook of it, is not noted again where it is computed again.
            skip_fwd_side_effects_in_bwd_under_checkpoint=True,
            ignore_logger_methods=torch._dynamo.config.ignore_logger_methods | said_once,
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
