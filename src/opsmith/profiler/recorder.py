"""Record the operators of this thread by name and time, for a quarter of what PyTorch's profiler asks.

The library is built at first use, as the kernels are, for this very version of PyTorch. Where it cannot be, PyTorch's
profiler does its work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.autograd.profiler import _run_on_profiler_start, _run_on_profiler_stop

from opsmith.kernels.build import BuildError, Library, build_libraries

SOURCE = Path(__file__).parent / "binding_recorder.cpp"
# PyTorch's own headers, which a library that asks for the stable ABI may not include.
_FLAGS = ("-std=c++20", "-UTORCH_TARGET_VERSION", f'-DOPSMITH_TORCH="{torch.__version__}"')
LIBRARY = Library("recorder", [SOURCE], flags=_FLAGS, tier="portable")

# What ran, in the order in which it began: name, start and end in nanoseconds since 1970.
Recorded = list[tuple[str, int, int]]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The recorder; None where it cannot be built or loaded."""
    if os.environ.get("OPSMITH_NATIVE") == "0":
        return None
    try:
        (path,) = build_libraries([LIBRARY])
        found = ctypes.CDLL(str(path))
    except (BuildError, OSError):  # older compilers do not read PyTorch's headers: its profiler serves
        return None
    found.recorder_count.restype = found.recorder_name_bytes.restype = ctypes.c_int64
    found.recorder_events.restype = found.recorder_names.restype = ctypes.c_void_p
    return found


@contextlib.contextmanager
def recording() -> Iterator[Recorded | None]:
    """Record what runs inside; what it yields is filled at the end. None where that is not possible."""
    recorder = library()
    if recorder is None or recorder.recorder_start() != 0:
        yield None
        return
    found: Recorded = []
    _run_on_profiler_start()  # compiled code annotates itself only where it is told of a profiler
    try:
        yield found
    finally:
        recorder.recorder_stop()
        _run_on_profiler_stop()
        count = recorder.recorder_count()
        if count:
            bytes_of = ctypes.string_at(recorder.recorder_names(), recorder.recorder_name_bytes())
            events = np.frombuffer(ctypes.string_at(recorder.recorder_events(), 24 * count), np.int64)
            names = bytes_of.decode(errors="replace").split("\0")[:-1]
            starts, ends, _ = events.reshape(count, 3).T.tolist()
            found.extend(zip(names, starts, ends, strict=True))
        recorder.recorder_release()
