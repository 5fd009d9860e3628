"""Engine child processes as the parent holds them: forked from a nursery that has vLLM imported, or spawned."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import IO, Any, Protocol

from .cpu_platform import has_cuda
from .engine_worker import Born, CannotFork

# one thread whatever the user's environment says: the model is tiny, several engines share a machine, sums keep their
# order, and a process with threads cannot be forked
CHILD_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_SPAWNED = "from replay_parity.harness.engine_worker import main; main()"
_NURSERY = "from replay_parity.harness.engine_nursery import main; main()"
_LOG_LINES = 20
_END_TIMEOUT = 5.0
_POLL_S = 0.02
_PACKET = 64
# seconds; on a busy machine vLLM's import has taken 60
IMPORT_TIMEOUT = 300.0


class ForkRefused(RuntimeError):
    """The nursery will not fork; the message says why."""


class Child(Protocol):
    """One engine child: where it listens and how it ends."""

    @property
    def pid(self) -> int | None:
        """Process id, None before it is born and once it has ended."""
        ...

    def ask(self, message: object, timeout: float) -> Any:
        """The answer to ``message``. Raises TimeoutError, ForkRefused, or EOFError or OSError if the child is gone."""
        ...

    def how_it_ended(self) -> str:
        """The exit status in words, once the connection is gone."""
        ...

    def log_tail(self) -> str:
        """The last lines it wrote."""
        ...

    def end(self) -> None:
        """Kill the child and wait for it: it holds nothing that needs an orderly end."""
        ...


class Log:
    """An unnamed file that a child writes to: nothing to clean up, whoever is killed."""

    def __init__(self) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(prefix="replay-parity-engine-")  # noqa: SIM115

    def tail(self) -> str:
        """The last lines."""
        try:
            descriptor = self.file.fileno()
            # pread: the child shares the file's offset
            text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", errors="replace")
        except (ValueError, OSError):
            # closed meanwhile by another thread
            return ""
        return "\n".join(text.splitlines()[-_LOG_LINES:])

    def close(self) -> None:
        """Give the file back."""
        self.file.close()


class SpawnedChild:
    """A child with a Python of its own: what a machine with CUDA needs, contexts do not survive a fork.

    ``program``: what it runs, with its connection's file descriptor and our process id as arguments.
    """

    def __init__(self, program: str = _SPAWNED) -> None:
        self.log = Log()
        here, there = socket.socketpair()
        with there:
            self.process = _python(program, there, self.log)
        self.connection = Connection(here.detach())
        # held while the connection is in use: it may not be closed under a thread that waits on it
        self.talking = threading.RLock()

    @property
    def pid(self) -> int | None:
        return None if self.process.poll() is not None else self.process.pid

    def ask(self, message: object, timeout: float) -> Any:
        with self.talking:
            self.connection.send(message)
            return _receive(self.connection, timeout)

    def how_it_ended(self) -> str:
        try:
            return _in_words("engine process", self.process.wait(_END_TIMEOUT))
        except subprocess.TimeoutExpired:
            return "the engine process closed its connection and went on"

    def log_tail(self) -> str:
        return self.log.tail()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        with self.talking:
            self.connection.close()
        self.log.close()


class ForkedChild:
    """A child of the nursery, which alone can wait for it; known by its pid from its first word on."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.log = Log()
        here, there = socket.socketpair()
        self.connection = Connection(here.detach())
        with there:
            nursery.fork(there, self.log)
        self.talking = threading.RLock()
        self.born: int | None = None
        self.status: int | None = None

    @property
    def pid(self) -> int | None:
        return self.born if self.born is not None and self._look("status") is None else None

    def ask(self, message: object, timeout: float) -> Any:
        until = time.monotonic() + timeout
        with self.talking:
            self.connection.send(message)
            while True:
                answer = _receive(self.connection, max(0.0, until - time.monotonic()))
                if isinstance(answer, CannotFork):
                    raise ForkRefused(answer.message)
                if not isinstance(answer, Born):
                    return answer
                self.born = answer.pid
                self.nursery.ready = True

    def how_it_ended(self) -> str:
        until = time.monotonic() + _END_TIMEOUT
        while self.nursery.alive and self.born is not None and time.monotonic() < until:
            status = self._look("status")
            if status is not None and self.nursery.alive:
                return _in_words("engine process", status)
            time.sleep(_POLL_S)
        if self.nursery.alive:
            return "the engine process closed its connection and went on"
        return self.nursery.how_it_ended()

    def log_tail(self) -> str:
        # a child that was never born left its reasons with the nursery
        return self.log.tail() or self.nursery.log.tail()

    def end(self) -> None:
        self._kill()
        # a nursery that is still importing sees this and does not fork at all; a thread that waits reads the end
        with contextlib.suppress(OSError):
            _shut(self.connection)
        with self.talking:
            self._kill()
            self.connection.close()
        self.log.close()

    def _kill(self) -> None:
        if self.born is not None:
            self._look("end")
        else:
            self.nursery.end_if_stuck()

    def _look(self, word: str) -> int | None:
        """The exit status, None while it runs; a child of a dead nursery is dead."""
        if self.status is None:
            assert self.born is not None
            self.status = self.nursery.ask(word, self.born)
        return self.status


class Nursery:
    """The nursery process, shared by all engines of this process; it ends when this process does."""

    def __init__(self) -> None:
        self.log = Log()
        self.owner = os.getpid()
        self.started = time.monotonic()
        self.ready = False
        self.control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(_END_TIMEOUT)
        with there:
            self.process = _python(_NURSERY, there, self.log)
        self.asking = threading.Lock()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def fork(self, connection: socket.socket, log: Log) -> None:
        """Ask for a child that speaks over ``connection``; while vLLM is being imported the request waits there."""
        # a dead nursery shows as a connection that is closed
        with contextlib.suppress(OSError), self.asking:
            socket.send_fds(self.control, [b"fork"], [connection.fileno(), log.file.fileno()])

    def ask(self, word: str, pid: int) -> int | None:
        """``status`` or ``end`` of a child: its exit status, None while it runs. A nursery that is mute is ended."""
        question = f"{word} {pid}".encode()
        with self.asking:
            try:
                self.control.send(question)
                # an answer whose asker was interrupted may come first
                while (answer := self.control.recv(_PACKET)) and not answer.startswith(question + b" "):
                    pass
            except OSError:
                answer = b""
        if not answer:
            # its children die with it
            self.end()
            return -signal.SIGKILL
        status = answer.split()[-1]
        return None if status == b"running" else int(status)

    def how_it_ended(self) -> str:
        """The exit status in words, once the process is gone."""
        return _in_words("engine nursery", self.process.wait())

    def end_if_stuck(self) -> None:
        """Give up a nursery that has not born a child in all the time an import may take."""
        if not self.ready and time.monotonic() - self.started > IMPORT_TIMEOUT:
            self.end()

    def end(self) -> None:
        """Kill the nursery, and its children with it."""
        self.process.kill()
        self.process.wait()


_nursery: Nursery | None = None
# False once the nursery has refused
_may_fork = True
_choosing = threading.Lock()


def open_child() -> Child:
    """A new engine child: forked, or spawned where there is CUDA or the nursery has refused to fork."""
    if has_cuda() or not _may_fork:
        return SpawnedChild()
    return ForkedChild(nursery())


def nursery() -> Nursery:
    """This process's nursery, started if there is none; a process forked from this one gets its own."""
    global _nursery
    with _choosing:
        if _nursery is None or _nursery.owner != os.getpid() or not _nursery.alive:
            _nursery = Nursery()
            atexit.register(_nursery.end)
        return _nursery


def spawn_from_now_on() -> None:
    """Let open_child ask the nursery no more."""
    global _may_fork
    _may_fork = False


def _python(code: str, there: socket.socket, log: Log) -> subprocess.Popen[bytes]:
    descriptor = there.fileno()
    # the same process group: Ctrl-C at a terminal reaches the child as well
    return subprocess.Popen(
        [sys.executable, "-c", code, str(descriptor), str(os.getpid())],
        env={**os.environ, **CHILD_ENV},
        stdin=subprocess.DEVNULL,
        stdout=log.file,
        stderr=subprocess.STDOUT,
        pass_fds=(descriptor,),
    )


def _receive(connection: Connection, timeout: float) -> Any:
    if not connection.poll(timeout):
        raise TimeoutError
    return connection.recv()


def _shut(connection: Connection) -> None:
    """End a connection that another thread may be waiting on: that thread reads the end of file."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _in_words(what: str, status: int) -> str:
    if status == -signal.SIGKILL:
        return f"the {what} was killed (SIGKILL: out of memory, or by hand)"
    if status < 0:
        return f"the {what} was ended by {signal.Signals(-status).name}"
    return f"the {what} ended with exit status {status}"
