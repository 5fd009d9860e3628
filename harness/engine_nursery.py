"""The nursery process: imports vLLM once, then forks an engine child for whoever asks, in milliseconds.

Importing vLLM costs more than everything else an engine's start does. A fork keeps the import, and is safe because
nothing in this process has made an engine, a thread or a CUDA context. The parent's handle is engine_children.Nursery;
it talks over a socket that keeps packets whole:

    fork          (with two file descriptors: the child's connection and its log) no answer here, the child speaks
    status PID    repeats the question and says running, or the exit status (negative: a signal)
    end PID       kills the child first, then as status

When the socket closes, the parent is gone: children are killed and the process ends. Children die with it too.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from . import engine_worker
from .engine_worker import Born, CannotFork, Raised

_PR_SET_PDEATHSIG = 1
# a thread that has been joined may stand in the kernel's list a moment longer
_THREADS_WAIT_S = 2.0
_PACKET = 64


def main() -> None:
    """Entry point: ``argv[1]`` is the file descriptor of the parent's socket, ``argv[2]`` the parent's pid."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # Ctrl-C ends the process at once, and its children with it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    refusal = why_not_fork() or _prepare(int(sys.argv[2]))
    _Nursery(control, refusal).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    # to tear down all that vLLM imported takes seconds, many on a loaded machine, and there is nothing to save
    os._exit(0)


def _prepare(parent: int) -> CannotFork | Raised | None:
    """Import what an engine needs; the reason why nobody can be forked, or None."""
    watch = engine_worker.ParentWatch(parent)
    try:
        engine_worker.import_engine()
    except Exception as error:
        traceback.print_exc()
        return Raised("start", engine_worker.one_line(error))
    finally:
        watch.stop()
    # what is here stays: collections in the children need not look at it, nor copy its pages
    gc.collect()
    gc.freeze()
    return why_not_fork()


def why_not_fork() -> CannotFork | None:
    """None in a process with a single thread, else the line that says how many there are: a fork would lose them."""
    give_up = time.monotonic() + _THREADS_WAIT_S
    while (count := len(os.listdir("/proc/self/task"))) > 1:
        if threading.active_count() > 1 or time.monotonic() > give_up:
            names = [thread.name for thread in threading.enumerate()[1:]]
            which = f" ({', '.join(names)})" if names else ""
            return CannotFork(f"{count - 1} threads beside the main one{which} would not survive a fork")
        time.sleep(0.01)
    return None


class _Nursery:
    """The loop over the parent's requests. ``refusal`` answers every fork where it is not None."""

    def __init__(self, control: socket.socket, refusal: CannotFork | Raised | None) -> None:
        self.control, self.refusal = control, refusal
        # exit status of each child, None while it runs
        self.children: dict[int, int | None] = {}

    def serve(self) -> None:
        """Answer until the parent's end closes."""
        while True:
            packet, descriptors, _, _ = socket.recv_fds(self.control, _PACKET, 2)
            self._reap()
            words = packet.decode().split()
            if not words:
                break
            if words[0] == "fork":
                self._fork(*descriptors)
            else:
                self._tell(words[0], int(words[1]))
        for pid in [pid for pid, status in self.children.items() if status is None]:
            os.kill(pid, signal.SIGKILL)

    def _fork(self, connection: int, log: int) -> None:
        try:
            # the parent may have given up while vLLM was being imported
            if not _hung_up(connection):
                refusal = self.refusal or why_not_fork()
                if refusal is None:
                    self._fork_child(connection, log)
                else:
                    _answer(connection, refusal)
        finally:
            os.close(connection)
            os.close(log)

    def _fork_child(self, connection: int, log: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        nursery = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _answer(connection, Raised("start", f"the engine process could not be forked: {error.strerror}"))
            return
        if pid:
            self.children[pid] = None
            return
        status = 1
        try:
            _die_with(nursery)
            self.control.close()
            os.dup2(log, sys.stdout.fileno())
            os.dup2(log, sys.stderr.fileno())
            os.close(log)
            child = Connection(connection)
            child.send(Born(os.getpid()))
            engine_worker.serve_first(child)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # never back into the nursery's loop
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _tell(self, word: str, pid: int) -> None:
        if word == "end" and self.children[pid] is None:
            os.kill(pid, signal.SIGKILL)
            self.children[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        status = self.children[pid]
        self.control.send(f"{word} {pid} {'running' if status is None else status}".encode())

    def _reap(self) -> None:
        while any(status is None for status in self.children.values()):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self.children[pid] = os.waitstatus_to_exitcode(status)


def _answer(connection: int, word: CannotFork | Raised) -> None:
    """Send in the place of a child that will not be; the parent may be gone."""
    answer = Connection(os.dup(connection))
    try:
        answer.send(word)
    except OSError:
        return
    finally:
        answer.close()


def _hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _die_with(nursery: int) -> None:
    """Have the kernel kill this process when the nursery dies, however long the engine holds the interpreter."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != nursery:
        os._exit(1)
