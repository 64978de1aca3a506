"""The C++ that binds kernels to PyTorch, read from their signature: the checks that memory safety needs, and no others.

Kernels' own files see no torch header. Rows that may lie apart are checked as `Rows` (binding.h), which need no view
of Python's; the tensors of a project, contiguous and of dtypes in combinations, by a `Call` (binding_call.h).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from opsmith.call.signature import IN_KERNELS, Dtype, Input, Kept, Made, Output, Parameter, Signature, Slope

__all__ = ["declarations", "project", "rows"]

_CPP = {float: "double", int: "int64_t", bool: "bool"}


def declarations(signature: Signature) -> dict[str, str]:
    """The kernels as C++ declares them, by name."""
    found = {signature.kernel or signature.name: signature.forward}
    if signature.gradient is not None:
        found[signature.gradient.kernel] = signature.backward
    return {kernel: f"void {kernel}({_joined(map(_taken, ps))})" for kernel, ps in found.items()}


def project(signature: Signature) -> str:
    """The C++ that checks calls of a project's kernels, and registers them for the CPU."""
    name, declared = signature.name, declarations(signature)
    text = [
        f"// Generated from the signature of {name}: checks the calls of its kernels and registers them.",
        '#include "project_binding.h"',
        "",
        f"namespace {name} {{",
        *(f"{one};" for one in declared.values()),
        "namespace {",
        "using opsmith::dtype_of;",
        "using opsmith::Tensor;",
        "using opsmith::view_of;",
        *_checked_at_once(signature, "forward", signature.forward),
        *(_checked_at_once(signature, "backward", signature.backward) if signature.gradient else ()),
        "}  // namespace",
        f"}}  // namespace {name}",
        "",
        f"STABLE_TORCH_LIBRARY_IMPL({name}, CPU, m) {{",
        *(f'  m.impl("{k}", opsmith::kernel<&{name}::{k}_op>.boxed);' for k in declared),
        "}",
        "",
    ]
    return "\n".join(text)


def _checked_at_once(signature: Signature, kernel: str, parameters: Sequence[Parameter]) -> Iterator[str]:
    tensors = [p for p in parameters if p.type is torch.Tensor]
    places = [[*signature.inputs, *signature.outputs].index(p.of.name) for p in tensors]
    columns = _joined(
        "{" + _joined(f"opsmith::DType::{IN_KERNELS[column[i]]}" for i in places) + "}"
        for column in signature.kernel_columns()
    )
    yield f"void {kernel}_op({_joined(map(_given, parameters))}) {{"
    yield f'  opsmith::Call call("{signature.name}");'
    for p in tensors:
        assert isinstance(p.of, Input | Output)
        sizes = _joined(f'"{size}"' for size in p.of.sizes)
        yield f'  call.tensor("{p.name}", {p.name}, {{{sizes}}});'
    yield f"  call.dtypes({{{_joined(f'dtype_of({p.name})' for p in tensors)}}}, {{{columns}}});"
    views = (f"view_of({p.name})" if p.type is torch.Tensor else p.name for p in parameters)
    yield f"  {kernel}({_joined(views)});"
    yield "}"


def rows(signature: Signature, kernel: str) -> str:
    """The C++ that checks calls of a kernel of the library, whose tensors are rows and vectors, and offers it."""
    parameters = signature.forward if kernel == signature.name else signature.backward
    text = [
        f"// Generated from the signature of {signature.name}: checks the calls of {kernel}, and offers it.",
        '#include "binding.h"',
        '#include "binding_rows_like.h"',
        "",
        "namespace opsmith {",
        f"void {kernel}({_joined(map(_taken, parameters))});",
        "namespace {",
        f"void {kernel}_op({_joined(map(_given, parameters))}) {{",
        *(f"  {line}" for line in _checked_as_rows(signature, kernel, parameters)),
        "}",
        "}  // namespace",
        "}  // namespace opsmith",
        "",
        "STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {",
        f'  opsmith::offer(m, "{kernel}", opsmith::kernel<&opsmith::{kernel}_op>);',
        "}",
        "",
    ]
    return "\n".join(text)


def _checked_as_rows(signature: Signature, kernel: str, parameters: Sequence[Parameter]) -> Iterator[str]:
    yield f'const char* const op = "{signature.name}";'
    tensors = [p for p in parameters if p.type is torch.Tensor]
    first = next(p for p in tensors if _is_rows(p) and not p.optional and not isinstance(p.source, Slope))
    least = 0 if signature.tensors[0].scalar else 1
    yield f'const Rows first(op, "{first.name}", {first.name});'
    yield f'STD_TORCH_CHECK({first.name}.dim() >= {least}, op, ": {first.name} must have a dimension");'
    views = []
    for p in parameters:
        name = p.name
        if p.type is not torch.Tensor:
            views.append(name)
        elif p is first:
            views.append("first.view()")
        elif _is_rows(p):
            yield f'const RowsLike rows_{name}(op, "{name}", {name}, first);'
            if isinstance(p.of, Input) and not p.written and kernel == signature.name:
                test = f"!{name} || same_sizes(*{name}, {first.name})"
                if not p.optional:
                    test = f"same_sizes({name}, {first.name})"
                yield f'STD_TORCH_CHECK({test}, op, ": {name} must have the sizes of {first.name}");'
            views.append(f"rows_{name}.view()")
        elif isinstance(p.of, Kept):
            yield f'check_vector(op, "{name}", {name}, first.rows(), true);'
            views.append(f"view_of({name})")
        else:
            yield f'check_vector(op, "{name}", {name}, first.n(), false);'
            yield from _vectors_dtype(p, first)
            views.append(f"view_of({name})")
        if isinstance(p.of, Output) and p.of.when and p.written:
            yield f'STD_TORCH_CHECK(!{p.of.when} || {name}, op, ": with {p.of.when}, {name} must be given too");'
        if isinstance(p.source, Made) and any(o.name == p.of.name and o.optional for o in tensors):
            yield f'STD_TORCH_CHECK(!{name} || {p.of.name}, op, ": there is no {p.of.name} to have a gradient");'
    yield f"{kernel}({_joined(views)});"


def _is_rows(p: Parameter) -> bool:
    return isinstance(p.of, Input | Output) and p.of.sizes[0] == "..."


def _vectors_dtype(p: Parameter, first: Parameter) -> Iterator[str]:
    """A vector's dtype; and that x has a dimension for it."""
    dtype = p.of.dtype if isinstance(p.of, Input | Output) else None
    either = " || dtype_of(*{0}) == DType::f32" if dtype is Dtype.FIRST_OR_FLOAT32 else ""
    words = "float32 or in the input's dtype" if either else "in the input's dtype"
    test = f"!{p.name} || ({first.name}.dim() > 0 && (dtype_of(*{p.name}) == first.dtype(){either.format(p.name)}))"
    yield f'STD_TORCH_CHECK({test}, op, ": {p.name} must be {words}");'


def _taken(p: Parameter) -> str:
    """A parameter as the kernel declares it."""
    return f"opsmith::View {p.name}" if p.type is torch.Tensor else f"{_CPP[p.type]} {p.name}"


def _given(p: Parameter) -> str:
    """The same as PyTorch gives it."""
    if p.type is not torch.Tensor:
        return f"{_CPP[p.type]} {p.name}"
    return f"const {'std::optional<Tensor>' if p.optional else 'Tensor'}& {p.name}"


def _joined(parts: Iterator[str] | Sequence[str] | map[str]) -> str:
    return ", ".join(parts)
