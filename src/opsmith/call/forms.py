"""Functions of a public function's own parameters, which hand these on in the order of its kernel's arguments.

What an operator's card has beside the public function is called as that is: the definition, the kernel without
autograd, the question whether the kernel can run. Their parameters and defaults are therefore read from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def in_order(
    public: Callable[..., Any],
    order: Sequence[str],
    converted: Mapping[str, Any],
    to: Callable[..., Any],
    *,
    out: bool = False,
) -> Callable[..., Any]:
    """A function of the same parameters that calls `to` with a kernel's arguments, as one tuple.

    It is written as text, so that Python binds the arguments: as soon as those of a function written by hand, with the
    same errors, and torch.compile has nothing else to trace.

    >>> in_order(lambda x, by=2.0: ..., ("by", "x"), {}, print)(7.0)
    (2.0, 7.0)

    Args:
        public: whose parameters they are.
        order: the kernel's arguments, by name.
        converted: what is no parameter of this name: a constant, or a function of parameters by their names.
        to: is called.
        out: whether `out`, where there is one, is a parameter too, and handed on behind the tuple.
    """
    parameters = inspect.signature(public).parameters
    names = {"to": to}
    values = []
    for name in order:
        if name not in converted:
            values.append(name)
            continue
        conversion = names[f"{name}_"] = converted[name]
        asked = f"({', '.join(inspect.signature(conversion).parameters)})" if callable(conversion) else ""
        values.append(f"{name}_{asked}")
    kept = [p for p in parameters.values() if out or p.name != "out"]
    defaults = {p.name: p.default for p in kept if p.default is not p.empty}
    head = inspect.Signature(
        [p.replace(annotation=p.empty, default=None if p.name in defaults else p.empty) for p in kept]
    )
    given = "".join(f"{value}, " for value in values)
    text = (
        f"def written({', '.join(names)}):\n"
        f"    def form{head}: return to(({given}){', out' if out and 'out' in parameters else ''})\n"
        f"    return form"
    )
    where: dict[str, Any] = {"__name__": public.__module__}
    exec(compile(text, f"<{public.__module__}.{public.__name__} in order>", "exec"), where)
    form = where["written"](**names)
    by_name = {p.name for p in kept if p.kind is p.KEYWORD_ONLY}
    form.__defaults__ = tuple(value for name, value in defaults.items() if name not in by_name)
    form.__kwdefaults__ = {name: value for name, value in defaults.items() if name in by_name}
    form.__name__ = form.__qualname__ = public.__name__
    return form  # type: ignore[no-any-return]
