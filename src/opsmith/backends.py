"""What brings kernels for a kind of device that the core knows nothing of: the interface, and who implements it.

The core's own are CPUs and GPUs. Another one is an object of a class derived from `Backend`, in a package that names it
under the entry points `opsmith.backends`; docs/authoring/backends.md has the smallest that works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsmith.installed import load_installed

if TYPE_CHECKING:
    import torch

    from opsmith.implementation import Implementation, Supports

OWN = ("cpu", "triton", "cuda")  # what the core writes, builds and runs for projects


class Backend:
    """One kind of device: what runs the library's operators there, and what writes, builds and runs a project's.

    Each member but the first two says by itself that the back end has nothing of its sort. Importing the module with
    the object must not import PyTorch: `opsmith new` needs none.
    """

    name: str  # what `--backends` calls it, and the folder of its kernels in a project
    device: str  # as PyTorch calls the type of its device
    kernels: str = ""  # where a project's kernel is in that folder: a pattern, with * for the operator's name
    layouts: bool = False  # whether its kernels take formats other than ND
    targets: tuple[str, ...] = ()  # what else `opsmith build --backend TARGET [FOLDER]` makes

    def here(self) -> Supports:
        """True where this machine has such a device, else the reason why not."""
        return available(self.device)

    def implementations(self, operator: str) -> Sequence[Implementation]:
        """What it adds to the card of that name; tried before the implementation "eager"."""
        return ()

    def write(self, project: Any) -> Mapping[str, str]:
        """The files of a new project's kernels, by their path in the folder of this back end.

        Args:
            project: an `opsmith.authoring.new.generate.Project`.

        Raises:
            PrototypeError: it has no kernel for what the prototype says.
        """
        raise NotImplementedError(f"{self.name} writes no kernels")

    def compile(self, kernels: Any, dtypes: Sequence[torch.dtype] = ()) -> str:
        """Compile a project's kernels, as far as this machine can, and say what came of it.

        Args:
            kernels: an `opsmith.authoring.project.Kernels`.
            dtypes: of the first input, by default all.

        Raises:
            BuildError: with the first error.
        """
        raise NotImplementedError(f"{self.name} compiles no kernels")

    def load(self, kernels: Any) -> Supports:
        """Register a project's kernels with PyTorch's dispatcher, for its device; True, or why that cannot be here."""
        return f"{self.name} runs no kernels of projects"

    def emulations(self, kernels: Any) -> Mapping[str, Callable[..., Any]]:
        """What runs a project's kernels on the CPU: `run(*inputs, *attributes, **outputs)` fills the outputs.

        Where there are several, by what tells them apart, all must give the same bits; the last is held to the card.
        """
        return {}

    def make(self, target: str, folder: Path | None) -> tuple[str, dict[str, Any]]:
        """One of the targets, for a project, or for the library where no folder is given: a text, and the same as data.

        Raises:
            BuildError: it cannot be made; the message has the next step.
        """
        raise NotImplementedError(f"{self.name} makes no {target}")


_ADDED: dict[str, Backend] = {}


def installed() -> dict[str, Backend]:
    """The back ends by their names: those of installed packages, and what `add` was given."""
    return {one.name: one for one in (*load_installed("backends"), *_ADDED.values())}


def add(backend: Backend) -> None:
    """Let a back end take part in this process, as if its package were installed.

    Raises:
        ValueError: there is one of that name.
    """
    if backend.name in (*OWN, *installed()):
        raise ValueError(f"a back end named {backend.name!r} is there already; choose another name")
    _ADDED[backend.name] = backend


def remove(name: str) -> None:
    """Take back what `add` was given."""
    del _ADDED[name]


def taking(device: str) -> Backend | None:
    """The back end whose tensors are on that type of device."""
    return next((one for one in installed().values() if one.device == device), None)


def available(device: str) -> Supports:
    """True where PyTorch itself can use that type of device here, else the reason why not."""
    import torch

    module = getattr(torch, device, None)
    found = module is not None and module.is_available()
    return found or f"no {device} device that this PyTorch can use"


def missing(name: str) -> str:
    """What to say to somebody who asks for a back end that is not here, or for a target of one."""
    text = f"no back end {name!r}; there are: {', '.join((*OWN, *installed()))}"
    required = {re.split(r"[^\w-]", word)[0] for word in metadata.requires("opsmith") or ()}
    for package in sorted(one for one in required if one.startswith("opsmith-")):
        if find_spec(package.replace("-", "_")) is None:
            text += f"; {package} has others: pip install {package}, in a checkout pip install -e packages/{package}"
    return text
