"""opsmith: fused operators for language models, and the compiler that puts them to use.

The public face: `optimize`, `load`, `save`, `restore`, `keep_input_guards`, `Config`, `Plan`, `PagedCache`, `evaluate`,
`Evaluation`, `profile`, `Profile`, `Operator`, `operator`, `authoring`, and the library in `opsmith.ops`.
Names are imported when they are first used, so that the command line starts without loading PyTorch. transformers
learns of opsmith's attention when opsmith is imported after it, and when such a name is used for the first time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from opsmith.decoding import register
from opsmith.version import VERSION

if TYPE_CHECKING:
    from opsmith import authoring as authoring, operator as operator, ops as ops
    from opsmith.checkpoints import load as load, save as save
    from opsmith.compiler import (
        Config as Config,
        Plan as Plan,
        keep_input_guards as keep_input_guards,
        optimize as optimize,
        restore as restore,
    )
    from opsmith.decoding import PagedCache as PagedCache
    from opsmith.evaluation import Evaluation as Evaluation, evaluate as evaluate
    from opsmith.operator import Operator as Operator
    from opsmith.profiler import Profile as Profile, profile as profile

_HOMES = {
    "Config": "opsmith.compiler",
    "Plan": "opsmith.compiler",
    "keep_input_guards": "opsmith.compiler",
    "optimize": "opsmith.compiler",
    "restore": "opsmith.compiler",
    "load": "opsmith.checkpoints",
    "save": "opsmith.checkpoints",
    "PagedCache": "opsmith.decoding",
    "Evaluation": "opsmith.evaluation",
    "evaluate": "opsmith.evaluation",
    "Profile": "opsmith.profiler",
    "profile": "opsmith.profiler",
    "Operator": "opsmith.operator",
    "operator": "opsmith.operator",  # the module, which is callable: `@opsmith.operator(...)`
    "authoring": "opsmith.authoring",
    "ops": "opsmith.ops",
}

__version__ = VERSION
__all__ = list(_HOMES)

register()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'opsmith' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    register()
    value = module if module.__name__ == f"opsmith.{name}" else getattr(module, name)
    globals()[name] = value
    return value
