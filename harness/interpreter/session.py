"""The interpreter switched on: inside ``with interpreted() as session`` every launch of a Triton kernel runs here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from .findings import Access, FallbackWarning
from .handle import Unsupported
from .launch import launch
from .memory import Check, Watch
from .regions import Regions
from .stock import run_stock
from .traffic import Launch, Traffic

_MOST = 1 << 20
_open = False


class Session:
    """What the launches of one ``interpreted`` block left behind.

    findings: bad accesses, where they are collected. traffic: bytes per launch, line and program. fallbacks: kernel ->
    why it ran in Triton's own interpreter. unchecked: (file, line) -> how often it used a pointer whose bounds are not
    known, because it was read from memory and its target was not registered.
    """

    def __init__(self, watch: Watch, unsupported: Literal["stock", "raise"], most: int) -> None:
        self.findings: list[Access] = watch.findings
        self.unchecked: dict[tuple[str, int], int] = watch.unchecked
        self.traffic = Traffic()
        self.fallbacks: dict[str, str] = {}
        self._watch = watch
        self._unsupported = unsupported
        self._most = most

    def register(self, name: str, tensor: Tensor) -> None:
        """Let pointers to ``tensor`` that kernels read from memory be checked against its storage."""
        self._watch.regions.register(name, tensor)
        self._watch.regions.keep()

    def run(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One launch."""
        for hook in kernel.pre_run_hooks:
            hook(*args, **kwargs)
        name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
        try:
            counted = launch(kernel.fn, grid, args, kwargs, self._watch, self._most)
        except Unsupported as why:
            if self._unsupported == "raise":
                raise
            if name not in self.fallbacks:
                self.fallbacks[name] = str(why)
                message = (
                    f"{name} runs in Triton's own interpreter, slow, unchecked and uncounted: no support for {why}"
                )
                warnings.warn(message, FallbackWarning, stacklevel=4)
            run_stock(kernel, grid, args, kwargs)
        else:
            if self._watch.launch is not None:
                self.traffic.launches.append(counted)


@contextmanager
def interpreted(
    *,
    bounds: Check = "raise",
    poison: Check = "off",
    traffic: Literal["on", "off"] = "on",
    regions: Sequence[Tensor] = (),
    unsupported: Literal["stock", "raise"] = "stock",
    max_programs: int = _MOST,
) -> Iterator[Session]:
    """Run Triton kernels on CPU tensors, all programs of a launch at once, in place.

    Works on kernels imported with and without TRITON_INTERPRET; of an autotuned kernel the first configuration runs.
    bounds: accesses outside the storage of the tensor that a pointer was made from are raised (BadAccess, memory as
    before the launch), collected (loads give 0, stores do nothing) or not looked for. poison: the same for NaN on
    used lanes of a load, which then stays NaN. regions: views; of their storages only their elements may be touched.
    unsupported: a kernel that cannot be run here runs in Triton's own interpreter with a FallbackWarning, or raises
    Unsupported. max_programs: at most so many programs at once; their number is cut by itself where blocks are large.
    """
    global _open
    if _open:
        raise RuntimeError("interpreted() is open already; launch inside the open block")
    if max_programs < 1:
        raise ValueError(f"max_programs is {max_programs}: at least 1")
    for name, value in (("bounds", bounds), ("poison", poison)):
        if value not in ("off", "collect", "raise"):
            raise ValueError(f"{name} is {value!r}: one of off, collect, raise")
    known = Regions(regions)
    known.keep()
    watch = Watch(known, [], {}, bounds, poison, Launch("", (1, 1, 1)) if traffic == "on" else None)
    session = Session(watch, unsupported, max_programs)
    before = [(owner, owner.run) for owner in (JITFunction, InterpretedFunction, Autotuner)]
    _open = True
    try:
        JITFunction.run = InterpretedFunction.run = _runner(session)
        Autotuner.run = _first_configuration
        yield session
    finally:
        for owner, run in before:
            owner.run = run
        _open = False


def _runner(session: Session) -> Any:
    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        if not warmup:
            session.run(self, grid, args, kwargs)

    return run


def _first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
    """An autotuned launch: nothing is measured here, the first configuration is as right as any."""
    configuration = self.configs[0]
    options = {**kwargs, **configuration.all_kwargs()}
    if configuration.pre_hook is not None:
        configuration.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **options})
    return self.fn.run(*args, **options)
