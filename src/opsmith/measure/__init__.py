"""The machine, its roofs, and the only timing code there is."""

from .checks import Checked, WrongResult, check_call, compare_outputs, poison, ulp
from .comparison import Comparison
from .contestants import Prepared, Repeated, as_replayed, captured
from .machine import Cache, Machine, describe
from .memory import can_reuse_memory, peak_bytes, reused_memory, trim, trim_later
from .pool import CacheFlush, Pool, cold_bytes
from .products import Widened, lacks_unit, slowness, without_unit
from .roofs import KINDS, ImpossibleTime, Probe, Roof, RoofProbes, Roofs
from .stats import CONCLUDES_NOTHING, Ratio, paired_ratio, spread
from .timing import by_clock, compare, measure_roofs, no_collection, once, quick
