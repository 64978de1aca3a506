"""Lowers Triton kernels to Linalg for Ascend NPUs, with neither an NPU nor CANN: no evidence from hardware.

Run by the Python of an environment that has `triton-ascend`, which takes over the name `triton` there. Reads variants
of kernels as JSON (`ahead.Variant.described`), one a line, and answers each with a line, before it takes the next one:
a compiler that crashes takes this process along, and who asked sees at which variant.

    python -m opsmith_ascend.lowering.stages < variants.json
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.compiler.errors import CompilationError

from opsmith.kernels.triton.ahead import place

# The front end's own form, that form after its common passes, and Linalg; the next stage needs CANN's compiler.
STAGES = ("triton", "ttir", "linalg")
# Of the chips with 192 KiB of local memory a vector core; the name has no effect before the stage that CANN does.
_CHIP = GPUTarget("npu", "Ascend910B", 0)
_ERROR = re.compile(r"^(?P<where>.*?):?\s*error: (?P<what>.*)$", re.MULTILINE)
_ASSERTION = re.compile(r"(?P<file>\w+\.cpp):\d+: .*Assertion `(?P<what>.*)' failed")
_SOURCE = re.compile(r'"?(?P<file>[^"\s(]+\.py)"?:(?P<line>\d+)')


def lower(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
    """Take a variant through the stages; where one refuses, its name, the reason and the line of the kernel."""
    backend = make_backend(_CHIP)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, signature, constants)
    try:
        module = source.make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
    except Exception as error:  # whatever the front end raises is what it says of the kernel
        return {"stage": STAGES[0], **_refusal(kernel, error)}
    steps: dict[str, Any] = {}
    backend.add_stages(steps, options)
    metadata = {"hash": source.hash(), "target": _CHIP, **vars(options)}
    for stage, step in (("ttir", "ttir"), ("linalg", "ttadapter")):
        try:
            module = steps[step](module, metadata)
        except subprocess.CalledProcessError as error:
            return {
                "stage": stage,
                **_complaint(kernel, error.stderr.decode(errors="replace"), error.returncode),
            }
        except RuntimeError as error:
            return {"stage": stage, **_complaint(kernel, str(error), 1)}
    return {"stage": None, "operations": len(re.findall(r"\blinalg\.\w+", module))}


def _refusal(kernel: Any, error: BaseException) -> dict[str, Any]:
    """What the front end means: the error of the innermost function, whose line it is."""
    while isinstance(error.__cause__, CompilationError):
        error = error.__cause__
    said = (
        (str(error.__cause__) if error.__cause__ else "") or getattr(error, "error_message", "") or str(error)
    )
    raised = re.fullmatch(r"""\w+\((["'])(.*)\1,?\)""", said, re.DOTALL)  # its repr of Python's own errors
    reason = " ".join((raised[2] if raised else said).split())
    source, node = getattr(error, "src", None), getattr(error, "node", None)
    for function in (kernel, *vars(sys.modules[kernel.__module__]).values(), *_inner(kernel)):
        if source is not None and getattr(function, "src", None) == source:
            return {"reason": reason, "where": place(function, f"at {getattr(node, 'lineno', 1)}:0:")}
    return {"reason": reason, "where": place(kernel, error)}


def _inner(kernel: Any) -> list[Any]:
    """The functions of all modules of ours: a kernel's own callees call on."""
    return [
        value
        for name, module in list(sys.modules.items())
        if name.startswith("opsmith.") and "triton" in name
        for value in vars(module).values()
    ]


def _complaint(kernel: Any, text: str, status: int) -> dict[str, Any]:
    """The first error of an MLIR pass, and the line of the kernel it names."""
    error = _ERROR.search(text)
    source = _SOURCE.search(error["where"] if error else "") or _SOURCE.search(text)
    where = f"{source['file']}:{source['line']}" if source else place(kernel, "")
    if error is not None:
        return {"reason": error["what"].strip(), "where": where}
    if status < 0:
        asserted = _ASSERTION.search(text)
        why = f": assertion {asserted['what']} in {asserted['file']}" if asserted else ""
        return {"reason": f"the lowering crashed ({signal.Signals(-status).name}){why}", "where": where}
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {"reason": f"status {status}: {lines[-1] if lines else 'no message'}", "where": where}


def _kernel(module: str, name: str, file: str) -> Any:
    """A kernel of the library by its module, one of a project by its file."""
    if module.startswith("opsmith."):
        return getattr(importlib.import_module(module), name)
    loaded = sys.modules.get(module)
    if loaded is None:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def main() -> None:
    """Answer every line of the input with one of the output."""
    print(json.dumps({"triton": triton.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        kernel = _kernel(asked["module"], asked["kernel"], asked["file"])
        constants = {
            name: tl.dtype(value["dtype"]) if isinstance(value, dict) else value
            for name, value in asked["constants"].items()
        }
        print(json.dumps(lower(kernel, asked["signature"], constants)), flush=True)


if __name__ == "__main__":
    main()
