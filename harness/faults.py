"""Planted faults: each is one small change to the source of the correct path, switched on for one run."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType


class FaultError(ValueError):
    """A fault that does not exist, has no form at the level asked for, or no longer fits the source it changes."""


@dataclass(frozen=True)
class Edit:
    """Replace ``old`` by ``new``, once, in the source of one function ("module:qualified.name" below replay_parity)."""

    where: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A named fault. ``edits`` holds its form at each level that can show it."""

    name: str
    what: str
    edits: dict[str, tuple[Edit, ...]]

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels that must catch it."""
        return tuple(self.edits)


def fault(name: str) -> Fault:
    """The fault of that name. Raises FaultError with the names there are."""
    found = FAULTS.get(name)
    if found is None:
        raise FaultError(f"fault: there is no {name!r}; there are {', '.join(FAULTS)}")
    return found


@contextmanager
def plant(name: str | None, level: str) -> Iterator[None]:
    """Run the block with the fault in place; None plants nothing.

    The functions' code is exchanged in place, so every holder of them sees the fault, and put back afterwards.
    Raises FaultError for an unknown name, a level without it, or source that has moved on.
    """
    with ExitStack() as stack:
        for edit in _edits(name, level):
            stack.enter_context(_edited(edit))
        yield


def _edits(name: str | None, level: str) -> tuple[Edit, ...]:
    if name is None:
        return ()
    found = fault(name)
    if level not in found.edits:
        raise FaultError(f"fault: {name} has no form at level {level}; it has one at {', '.join(found.edits)}")
    return found.edits[level]


@contextmanager
def _edited(edit: Edit) -> Iterator[None]:
    function = _function(edit.where)
    original = function.__code__
    function.__code__ = _changed_code(function, edit)
    try:
        yield
    finally:
        function.__code__ = original


def _function(where: str) -> FunctionType:
    module, _, path = where.partition(":")
    found: object = importlib.import_module(f"{__package__.rsplit('.', 1)[0]}.{module}")
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    unwrapped = inspect.unwrap(found) if callable(found) else found
    if not isinstance(unwrapped, FunctionType):
        raise FaultError(f"{where}: is no function")
    return unwrapped


def _changed_code(function: FunctionType, edit: Edit) -> CodeType:
    lines, first = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    if source.count(edit.old) != 1:
        raise FaultError(f"{edit.where}: {edit.old!r} stands there {source.count(edit.old)} times, it must be once")
    changed = source.replace(edit.old, edit.new)
    # inside a class, so that super() finds its cell; line numbers stay those of the file
    wrapped = "class _:\n" + textwrap.indent(changed, " ")
    module = compile("\n" * (first - 2) + wrapped, function.__code__.co_filename, "exec")
    for code in _nested(module):
        if code.co_name == function.__name__ and code.co_freevars == function.__code__.co_freevars:
            return code.replace(co_qualname=function.__code__.co_qualname)
    raise FaultError(f"{edit.where}: the changed source has no function {function.__name__} like the original")


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _fault(name: str, what: str, **edits: Edit | tuple[Edit, ...]) -> Fault:
    return Fault(name, what, {level: e if isinstance(e, tuple) else (e,) for level, e in edits.items()})


_RING_WRITE_NEXT = Edit(
    "kernels.decode_torch:put_entry",
    "entries.index_put_((slot, position),",
    "entries.index_put_((slot, torch.where(write, position + 1, position)),",
)

_ALL = (
    _fault(
        "cursor.prompt_base",
        "decode base = prompt length after a resume (vllm #46239, #48018, #62004)",
        schedule=Edit(
            "harness.schedule_path:_Runner._handed_to_prefill",
            "return row.prefill_len",
            "return self.case.requests[row.request].prompt_len",
        ),
        # what a request was first admitted with is its prompt
        engine=Edit(
            "kernels.vllm_model_state:decode_base_snapshot",
            "torch.from_numpy(input_batch.prefill_len_np[: input_batch.num_reqs])",
            "torch.tensor([decode_base_snapshot.__dict__.setdefault(name, int(length)) for name, length in"
            " zip(input_batch.req_ids, input_batch.prefill_len_np)])",
        ),
    ),
    _fault(
        "cursor.leftover_append",
        "one-token prompt tail appended to the ring, not flushed (vllm #49847)",
        schedule=Edit(
            "kernels.cursor:decode_cursor", "is_flush = is_flush | is_leftover", "is_flush = is_flush & ~is_leftover"
        ),
        engine=Edit(
            "kernels.cursor:decode_cursor", "is_flush = is_flush | is_leftover", "is_flush = is_flush & ~is_leftover"
        ),
    ),
    _fault(
        "ring.write_next",
        "ring entry written at w + 1",
        kernel=_RING_WRITE_NEXT,
        schedule=_RING_WRITE_NEXT,
        engine=_RING_WRITE_NEXT,
    ),
)

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
