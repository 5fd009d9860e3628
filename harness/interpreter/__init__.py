"""Triton kernels on a CPU, unmodified, all programs of a launch at once, their memory accesses checked and counted."""

from .findings import Access, BadAccess, FallbackWarning, KernelError
from .handle import Unsupported
from .session import Session, interpreted
from .source import rewritten
from .stock import run_stock
from .traffic import Launch, Line, Traffic

__all__ = [
    "Access",
    "BadAccess",
    "FallbackWarning",
    "KernelError",
    "Launch",
    "Line",
    "Session",
    "Traffic",
    "Unsupported",
    "interpreted",
    "rewritten",
    "run_stock",
]
