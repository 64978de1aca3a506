"""The machine, its roofs, and the only timing code there is."""

from .checks import Checked, WrongResult, check_call, compare_outputs, poison, ulp
from .clock import CudaStopwatch, WallStopwatch
from .comparison import Comparison
from .machine import Cache, Machine, describe
from .pool import CacheFlush, Pool, cold_bytes
from .roofs import KINDS, ImpossibleTime, Probe, Roof, RoofProbes, Roofs, roof_fraction
from .stats import CONCLUDES_NOTHING, Ratio, paired_ratio, spread
from .timing import columns, compare, measure_roofs, quick

__all__ = [
    "CONCLUDES_NOTHING",
    "KINDS",
    "Cache",
    "CacheFlush",
    "Checked",
    "Comparison",
    "CudaStopwatch",
    "ImpossibleTime",
    "Machine",
    "Pool",
    "Probe",
    "Ratio",
    "Roof",
    "RoofProbes",
    "Roofs",
    "WallStopwatch",
    "WrongResult",
    "check_call",
    "cold_bytes",
    "columns",
    "compare",
    "compare_outputs",
    "describe",
    "measure_roofs",
    "paired_ratio",
    "poison",
    "quick",
    "roof_fraction",
    "spread",
    "ulp",
]
