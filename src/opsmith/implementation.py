"""One way to compute an operator: a function, the device it runs on, and which calls it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Supports = bool | str  # True, or the reason why not


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator. `supports` answers True, or the reason why not.

    `prepack(weight, rows)` turns a constant weight into the layout that `fn` reads fastest for that many rows of
    input; `fn` takes the packed tensor in the weight's place. The compiler calls it once per site.
    """

    name: str
    fn: Callable[..., Any]
    device: str = "any"
    supports: Callable[..., Supports] = lambda *args, **kwargs: True
    available: Callable[[], Supports] = lambda: True
    takes_out: bool = False
    prepack: Callable[[Tensor, int], Tensor] | None = None
    packs_alike: bool = False  # whether that layout is the same for any number of rows
    margin: float = 1.0  # how much faster it is to be, for what its use costs beside its time
    repeatable: bool = True  # False: two runs may differ in the last bits, as sums by atomic additions do

    def accepts(self, *args: Any, **kwargs: Any) -> Supports:
        """True when this implementation can run this very call, else the reason why not."""
        here = self.available()
        if here is not True:
            return here
        if self.device != "any":
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.device.type != self.device:
                    return f"{self.name} runs on {self.device}, the input is on {value.device.type}"
        return self.supports(*args, **kwargs)
