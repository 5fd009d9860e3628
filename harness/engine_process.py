"""The parent's side: an engine in a child process whose crash, hang or exception comes back as a value."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ..cases.case import Case
from .engine_trace import EngineConfig, EngineTrace
from .engine_worker import Opened, Play, Raised, Refused

Symptom = Literal["exception", "timeout", "crash"]
Stage = Literal["start", "play"]

START_TIMEOUT = 300.0
CASE_TIMEOUT = 300.0

_CHILD = "from replay_parity.harness.engine_worker import main; main()"
# one thread: the model is tiny, several engines share a machine, and sums keep their order
_CHILD_ENV = {"OMP_NUM_THREADS": "1"}
_LOG_LINES = 20
_END_TIMEOUT = 5.0


@dataclass(frozen=True)
class EngineFailure:
    """An engine that did not answer with a trace.

    ``message`` is one line and the same from run to run; ``log`` holds the last lines that the child wrote, with
    whatever process ids and times vLLM put into them.
    """

    symptom: Symptom
    stage: Stage
    message: str
    log: str = ""


class EngineProcess:
    """One engine in a child process, opened by the first play and again by the next one after a failure.

    ``config`` and ``fault`` (a name of faults.py, planted before the engine opens) hold for its whole life; timeouts
    are seconds. A context manager: leaving it ends the child. The child also ends when this process does, however that
    happens. One thread at a time may ``play``; ``close`` from another one ends that play.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        fault: str | None = None,
        start_timeout: float = START_TIMEOUT,
        case_timeout: float = CASE_TIMEOUT,
    ) -> None:
        self.config, self.fault = config, fault
        self.start_timeout, self.case_timeout = start_timeout, case_timeout
        self.block_size: int | None = None
        self._child: _Child | None = None
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
        return None if child is None or not child.alive else child.process.pid

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
            self._child = _Child()
        answer = self._ask("start", self.start_timeout, (self.config, self.fault))
        if isinstance(answer, EngineFailure):
            return answer
        if not isinstance(answer, Opened):
            return self._fail("exception", "start", f"the engine answered with {type(answer).__name__}")
        self.block_size = answer.block_size
        return None

    def close(self) -> None:
        """End the child and remove its log; a play that is running in another thread comes back as a crash."""
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
            return self._fail("exception", answer.stage, answer.message)
        return answer

    def _fail(self, symptom: Symptom, stage: Stage, message: str) -> EngineFailure:
        child = self._child
        log = "" if child is None else child.log_tail()
        self._drop()
        return EngineFailure(symptom, stage, message, log)

    def _drop(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """The running child: its process, its end of the socket pair, its log."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="replay-parity-engine-", ignore_cleanup_errors=True)
        self.log = Path(self.folder.name) / "engine.log"
        here, there = socket.socketpair()
        with there, self.log.open("wb") as log:
            descriptor = there.fileno()
            # the same process group: Ctrl-C at a terminal reaches the child as well
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(descriptor), str(os.getpid())],
                env={**_CHILD_ENV, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(descriptor,),
            )
        self.connection = Connection(here.detach())
        # held while the connection is in use: it may not be closed under a thread that waits on it
        self.talking = threading.RLock()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, message: object, timeout: float) -> Any:
        """The answer to ``message``. Raises TimeoutError, or EOFError or OSError if the child is gone."""
        with self.talking:
            self.connection.send(message)
            if not self.connection.poll(timeout):
                raise TimeoutError
            return self.connection.recv()

    def how_it_ended(self) -> str:
        """The exit status in words, once the connection is gone."""
        try:
            status = self.process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "the engine process closed its connection and went on"
        if status == -signal.SIGKILL:
            return "the engine process was killed (SIGKILL: out of memory, or by hand)"
        if status < 0:
            return f"the engine process was ended by {signal.Signals(-status).name}"
        return f"the engine process ended with exit status {status}"

    def log_tail(self) -> str:
        """The last lines the child wrote."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_LOG_LINES:])

    def end(self) -> None:
        """Kill the child and wait for it: it holds nothing that needs an orderly end."""
        if self.alive:
            self.process.kill()
        self.process.wait()
        with self.talking:
            self.connection.close()
        self.folder.cleanup()
