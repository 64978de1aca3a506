"""Triton's interpreter, the same in half the time: it runs a kernel's every program in Python, one operation at a time.

Where it computes one answer anew for each operation, as the NumPy type of a Triton type or the properties of a
shape, the answer is kept here. Nothing that it computes or checks is left out.
"""

import dataclasses
import functools
import types
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter

__all__ = ["hasten"]

VERSION = "3.9.0"  # of constraints.txt: whose internals these are. Another one runs as it is.


def hasten() -> None:
    """Make this process's interpreter faster."""
    if triton.__version__ != VERSION:
        return
    interpreter.InterpretedFunction.__call__ = call_from_a_kernel
    keep_numpy_types()
    keep_shapes()
    shorten_calls()
    interpreter.InterpreterBuilder.cast_impl = cast_with(interpreter.InterpreterBuilder.cast_impl)
    # Whether a sum of integers overflows is computed with ten operations, and thrown away: asserts are off.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


@functools.cache
def languages(function: Any) -> list[Any]:
    """The modules of Triton's language that a `@triton.jit` function sees."""
    seen = [value for value in function.__globals__.values() if isinstance(value, types.ModuleType)]
    return [module for module in seen if module in (tl, tl.core)]


def call_from_a_kernel(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a `@triton.jit` function from a kernel that the interpreter runs.

    The interpreter's own method replaces all builtins of the language anew at each such call, also where the
    kernel's start has done it.
    """
    if any(tl.core.is_builtin(language.load) for language in languages(function.fn)):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


def keep_numpy_types() -> None:
    """The interpreter's own function builds its whole table at each call."""
    find, found = interpreter._get_np_dtype, {}

    def kept(ty: Any) -> np.dtype:
        name = ty.scalar.name
        if name not in found:
            found[name] = find(ty)
        return found[name]

    interpreter._get_np_dtype = kept

    equal = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def shorten_calls() -> None:
    """Asks two operands of one type for no common one, makes a constant once, and asks no tensor whether it is one."""
    check, unwrap = semantic.TritonSemantic.binary_op_type_checking_impl, tl.core._unwrap_if_constexpr
    alike = (tl.float32, tl.int32, tl.int64)  # whose sums, quotients, ... of two have their type
    constants: dict[Any, Any] = {}

    def types_of_two(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if type(lhs) is tl.tensor and lhs.dtype in alike:
            if type(rhs) is tl.tensor and lhs.dtype is rhs.dtype:
                return self.broadcast_impl_value(lhs, rhs)
            if type(rhs) in (int, float) and rhs != 0:  # 0.0 and -0.0 are equal, and two numbers
                sizes = lhs.type.sizes if lhs.type.is_block() else None
                key = (type(rhs), rhs, lhs.dtype.name, sizes, args, *kwargs.items())
                if key not in constants:
                    same, constants[key] = check(self, lhs, rhs, *args, **kwargs)
                    if same is not lhs or len(constants) > 1000:
                        return same, constants.pop(key)
                return lhs, constants[key]
        return check(self, lhs, rhs, *args, **kwargs)

    def value_of(o: Any) -> Any:
        return o if type(o) in (tl.tensor, int, float, bool, type(None)) else unwrap(o)

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, member: Any = member, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, call)

    semantic.TritonSemantic.binary_op_type_checking_impl = types_of_two
    tl.core._unwrap_if_constexpr = value_of
    interpreter._patch_attr = patch


def cast_with(cast: Any) -> Any:
    """Casts between bfloat16 and float32 by a shift, as they share their upper bits; others in the interpreter's way.

    That takes a number apart and builds it anew, in a few dozen steps, and truncates, as this does. All numbers come
    out the same but subnormal ones, of which it makes others: a shift is right for these too.
    """

    def impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source is tl.bfloat16 and target is tl.float32:
            data = (src.data.astype(np.uint32) << 16).view(np.float32)
        elif source is tl.float32 and target is tl.bfloat16:
            data = (src.data.view(np.uint32) >> 16).astype(np.uint16)
        else:
            return cast(self, src, dst_type)
        return interpreter.TensorHandle(data, target)

    return impl


def keep_shapes() -> None:
    """Checks a shape, and makes the objects that describe it, once for all values and types of that shape."""
    block, tensor = tl.block_type.__init__, tl.tensor.__init__
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    of_types: dict[Any, tuple[Any, int]] = {}
    of_values: dict[Any, tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes in of_types:
            self.element_ty = element_ty
            self.shape, self.numel = of_types[sizes]
        else:
            block(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel
        self.sizes = sizes

    def value(self: Any, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else ()
        if sizes in of_values:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = of_values[sizes]
        else:
            tensor(self, handle, type)
            of_values[sizes] = self.shape, self.numel

    def broadcast_two(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.sizes == b.sizes:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = value
    semantic.TritonSemantic.broadcast_impl_value = broadcast_two
