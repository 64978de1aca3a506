"""The C++ that binds kernels to PyTorch, read from their signature: the checks that memory safety needs, and no others.

Kernels' own files see no torch header. Rows that may lie apart are checked as `Rows` (binding.h), which need no view
of Python's; the tensors of a project, contiguous and of dtypes in combinations, by a `Call` (binding_call.h).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from opsmith.call.signature import (
    IN_KERNELS,
    Dtype,
    Input,
    Kept,
    Made,
    Number,
    Output,
    Parameter,
    Signature,
    Sizes,
    Slope,
)

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
        'extern "C" __attribute__((visibility("default"))) opsmith::Direct opsmith_kernel(const char* name) {',
        f'  if (std::string_view(name) == "{signature.entry}") return opsmith::kernel<&{name}::forward_op>.direct;',
        "  return nullptr;",
        "}",
        "",
    ]
    return "\n".join(text)


def _checked_at_once(signature: Signature, kernel: str, parameters: Sequence[Parameter]) -> Iterator[str]:
    tensors = [p for p in parameters if p.type is Tensor]
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
    # What else a call refuses: Python says it in its own words.
    for size in signature.even:
        t = next(one for one in signature.tensors if size in one.sizes)
        test = f"{t.name}.size({t.name}.dim() - {len(t.sizes) - t.sizes.index(size)}) % 2 == 0"
        yield f'  STD_TORCH_CHECK({test}, "{signature.name}: {size} must be even");'
    yield f"  call.dtypes({{{_joined(f'dtype_of({p.name})' for p in tensors)}}}, {{{columns}}});"
    views = (f"view_of({p.name})" if p.type is Tensor else p.name for p in parameters)
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
    tensors = [p for p in parameters if p.type is Tensor]
    first = next(p for p in tensors if _is_rows(p) and not p.optional and not isinstance(p.source, Slope))
    least = 0 if signature.tensors[0].scalar else 1
    yield f'const Rows first(op, "{first.name}", {first.name});'
    yield _check(f"{first.name}.dim() >= {least}", f"{first.name} must have a dimension")
    yield _check("is_floating(first.dtype())", f"{first.name} must be floating-point")
    views = []
    for p in parameters:
        name = p.name
        views.append(f"view_of({name})" if p.type is Tensor else name)
        if p.type is not Tensor:
            if isinstance(p.of, Number) and p.of.within:
                test = "{} <= {name} && {name} <= {}".format(*p.of.within, name=name)
                yield _check(test, f"no {name} ", name)
        elif p is first:
            views[-1] = "first.view()"
        elif _is_rows(p):
            yield from _row_checks(signature, p, first)
            views[-1] = f"rows_{name}.view()"
        elif isinstance(p.of, Kept):
            yield f'check_vector(op, "{name}", {name}, first.rows(), true);'
        elif isinstance(p.of, Input | Output):
            yield from _few_checks(p.of.sizes, p, first)
        yield from _company(p, tensors)
    yield f"{kernel}({_joined(views)});"


def _row_checks(signature: Signature, p: Parameter, first: Parameter) -> Iterator[str]:
    """Rows as those of the first, or half as wide where these hold two."""
    name, like = p.name, "first"
    if isinstance(p.of, Output) and p.of.halved_without:
        other = p.of.halved_without
        yield _check(
            f"{other} || first.n() % 2 == 0", "packed rows must have an even size, got ", "first.n()"
        )
        like = f"{other} ? first : first.half(false)"
    if isinstance(p.of, Output) and isinstance(p.of.dtype, torch.dtype):
        dtype = f"DType::{IN_KERNELS[p.of.dtype]}"
        yield f'const Rows rows_{name}(op, "{name}", {name});'
        yield _check(
            f"rows_{name}.rows() == first.rows() && rows_{name}.n() == first.n() && rows_{name}.dtype() == {dtype}",
            f"{name} must be {str(p.of.dtype).removeprefix('torch.')}, of {first.name}'s size",
        )
        return
    yield f'const RowsLike rows_{name}(op, "{name}", {name}, {like});'
    if isinstance(p.of, Input) and not p.written and p.source is None:
        test = f"!{name} || same_sizes(*{name}, {first.name})"
        if not p.optional:
            test = f"same_sizes({name}, {first.name})"
        yield _check(test, f"{name} must have the sizes of {first.name}")


def _company(p: Parameter, tensors: Sequence[Parameter]) -> Iterator[str]:
    """What has to be there, or may not, where this parameter is."""
    name = p.name
    if isinstance(p.of, Output) and p.written:
        if p.of.when:
            yield _check(f"!{p.of.when} || {name}", f"with {p.of.when}, {name} must be given too")
        if p.of.unless:
            yield _check(f"bool({name}) != bool({p.of.unless})", f"either {p.of.unless} or {name}")
    if isinstance(p.of, Input) and p.of.needs and p.source is None:
        yield _check(f"!{name} || {p.of.needs}", f"there is no {p.of.needs} for {name}")
    if isinstance(p.source, Made) and any(o.name == p.of.name and o.optional for o in tensors):
        yield _check(f"!{name} || {p.of.name}", f"there is no {p.of.name} to have a gradient")
        if p.source.always:
            yield _check(f"{name} || !{p.of.name}", f"with {p.of.name}, {name} must be given too")


def _check(test: str, *words: str) -> str:
    """A line that refuses what fails a test; of the words, those after the first are C++."""
    text, *values = words
    said = _joined((f'": {text}"', *values))
    return f"STD_TORCH_CHECK({test}, op, {said});"


def _is_rows(p: Parameter) -> bool:
    return isinstance(p.of, Input | Output) and p.of.sizes[:1] == ("...",) and len(p.of.sizes) == 2


def _few_checks(sizes: Sizes, p: Parameter, first: Parameter) -> Iterator[str]:
    """A vector and its dtype, a number for each row, or one number."""
    name = p.name
    if sizes == ("...",):
        yield f'check_number_each(op, "{name}", {name}, first.rows());'
    elif not sizes:
        yield _check(f"!{name} || is_number(*{name})", f"{name} must be one float32")
    else:
        yield f'check_vector(op, "{name}", {name}, first.n(), false);'
        dtype = p.of.dtype if isinstance(p.of, Input | Output) else None
        either = f" || dtype_of(*{name}) == DType::f32" if dtype is Dtype.FIRST_OR_FLOAT32 else ""
        words = "float32 or in the input's dtype" if either else "in the input's dtype"
        test = f"!{name} || ({first.name}.dim() > 0 && (dtype_of(*{name}) == first.dtype(){either}))"
        yield _check(test, f"{name} must be {words}")


def _taken(p: Parameter) -> str:
    """A parameter as the kernel declares it."""
    return f"opsmith::View {p.name}" if p.type is Tensor else f"{_CPP[p.type]} {p.name}"


def _given(p: Parameter) -> str:
    """The same as PyTorch gives it."""
    if p.type is not Tensor:
        return f"{_CPP[p.type]} {p.name}"
    return f"const {'std::optional<Tensor>' if p.optional else 'Tensor'}& {p.name}"


def _joined(parts: Iterator[str] | Sequence[str] | map[str]) -> str:
    return ", ".join(parts)
