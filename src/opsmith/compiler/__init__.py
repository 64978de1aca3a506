"""The model compiler: capture, recognize, select, prove, plan, run; one file per stage."""

from opsmith.compiler.api import backend, optimize, restore
from opsmith.compiler.config import Config
from opsmith.compiler.frozen import keep_input_guards
from opsmith.compiler.plan import Plan
from opsmith.compiler.report import Report
from opsmith.compiler.session import Session

__all__ = ["Config", "Plan", "Report", "Session", "backend", "keep_input_guards", "optimize", "restore"]
