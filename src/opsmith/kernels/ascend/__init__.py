"""The kernels in Ascend C, and what runs the very same files on a CPU: emulated, which says nothing about a board.

emulate()   one launch of a kernel file, stopped at the first thing that a board would punish
Launch      the call of a kernel that an operator makes; STEM.py beside STEM.cpp has the function for it
"""

from opsmith.kernels.ascend.harness import SOURCES, Emulation, EmulationError, emulate
from opsmith.kernels.ascend.launch import Launch

__all__ = ["SOURCES", "Emulation", "EmulationError", "Launch", "emulate"]
