"""The model compiler: capture, recognize, select, prove, plan, run; one file per stage."""

from opsmith.compiler.api import Session, backend, optimize, restore
from opsmith.compiler.config import Config
from opsmith.compiler.plan import Plan
from opsmith.compiler.report import Report

__all__ = ["Config", "Plan", "Report", "Session", "backend", "optimize", "restore"]
