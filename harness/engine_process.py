"""The parent's side: an engine in a child process whose crash, hang or exception comes back as a value."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ..cases.case import Case
from .engine_children import Child, ForkRefused, SpawnedChild, open_child, spawn_from_now_on
from .engine_trace import EngineConfig, EngineTrace
from .engine_worker import Opened, Play, Raised, Refused
from .execution import may_compile

Symptom = Literal["exception", "timeout", "crash"]
Stage = Literal["start", "play"]

START_TIMEOUT = 300.0
CASE_TIMEOUT = 300.0

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineFailure:
    """An engine that did not answer with a trace.

    ``message`` is one line and the same from run to run; ``log`` holds the last lines that the child wrote, with
    whatever process ids and times vLLM put into them. ``trace``: rows and samples up to the step that raised, where the
    engine could still say.
    """

    symptom: Symptom
    stage: Stage
    message: str
    log: str = ""
    trace: EngineTrace | None = None


class EngineProcess:
    """One engine in a child process, opened by the first play and again by the next one after a failure.

    ``config`` and ``fault`` (a name of faults.py, planted before the engine opens) hold for its whole life; timeouts
    are seconds; ``child`` makes the child process. A context manager: leaving it ends the child. The child also ends
    when this process does, however that happens. One thread at a time may ``play``; ``close`` from another one ends
    that play.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        fault: str | None = None,
        start_timeout: float = START_TIMEOUT,
        case_timeout: float = CASE_TIMEOUT,
        child: Callable[[], Child] = open_child,
    ) -> None:
        self.config, self.fault = config, fault
        self.start_timeout, self.case_timeout = start_timeout, case_timeout
        self.block_size: int | None = None
        # vLLM's mode and cudagraph_mode, once it is open
        self.execution: dict[str, str] | None = None
        self._caches: tempfile.TemporaryDirectory[str] | None = None
        self._open_child = child
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        child = self._child
        return None if child is None else child.pid

    @property
    def caches(self) -> Path | None:
        """Where the child keeps what it compiles, None where it is eager or there is none."""
        caches = self._caches
        return None if caches is None else Path(caches.name)

    def play(
        self, case: Case, prompts: Sequence[list[int]], forced: Sequence[list[int]]
    ) -> EngineTrace | EngineFailure:
        """Play one Case: token ids of each request's prompt and output. Opens an engine first where none is open."""
        failure = self.start()
        if failure is not None:
            return failure
        answer = self._ask("play", self.case_timeout, Play(case, prompts, forced))
        if isinstance(answer, (EngineTrace, EngineFailure)):
            return answer
        if isinstance(answer, Refused):
            return EngineFailure("exception", "play", answer.message)
        return self._fail("exception", "play", f"the engine answered with {type(answer).__name__}")

    def start(self) -> EngineFailure | None:
        """Open the engine now unless it is open; None when it is, and ``block_size`` is then its own."""
        if self.pid is not None:
            return None
        self._drop()
        with self._lock:
            if self._closed:
                return EngineFailure("crash", "start", "the engine process was closed")
            self._child = self._open_child()
        try:
            answer = self._ask("start", self.start_timeout, (self.config, self.fault, self._own_caches()))
        except ForkRefused as refused:
            _LOG.warning("engines start slowly, in processes of their own: %s", refused)
            spawn_from_now_on()
            self._open_child = SpawnedChild
            return self.start()
        if isinstance(answer, EngineFailure):
            return answer
        if not isinstance(answer, Opened):
            return self._fail("exception", "start", f"the engine answered with {type(answer).__name__}")
        self.block_size, self.execution = answer.block_size, answer.execution
        return None

    def close(self) -> None:
        """End the child; a play that is running in another thread comes back as a crash."""
        with self._lock:
            self._closed = True
        self._drop()

    def _ask(self, stage: Stage, timeout: float, message: object) -> Any:
        """Send one message and wait for the answer, at most ``timeout`` seconds; a failure drops the child."""
        child = self._child
        if child is None:
            return self._fail("crash", stage, "the engine process was closed")
        try:
            answer = child.ask(message, timeout)
        except TimeoutError:
            return self._fail("timeout", stage, f"no answer within {timeout:g} s")
        except (EOFError, OSError):
            return self._fail("crash", stage, child.how_it_ended())
        except BaseException:
            # Ctrl-C among others: the child must not go on alone
            self._drop()
            raise
        if isinstance(answer, Raised):
            return self._fail("exception", answer.stage, answer.message, answer.trace)
        return answer

    def _fail(self, symptom: Symptom, stage: Stage, message: str, trace: EngineTrace | None = None) -> EngineFailure:
        child = self._child
        log = "" if child is None else child.log_tail()
        self._drop()
        return EngineFailure(symptom, stage, message, log, trace)

    def _own_caches(self) -> Path | None:
        """A new directory for what this child compiles, which goes with it however it ends; None where it is eager."""
        if not may_compile(self.config):
            return None
        self._caches = tempfile.TemporaryDirectory(prefix="replay-parity-compiled-", ignore_cleanup_errors=True)
        return self.caches

    def _drop(self) -> None:
        with self._lock:
            child, self._child = self._child, None
            caches, self._caches = self._caches, None
        if child is not None:
            child.end()
        if caches is not None:
            caches.cleanup()
