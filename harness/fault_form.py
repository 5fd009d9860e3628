"""What a planted fault is: edits of source, by level, and what must come of them."""

from __future__ import annotations

from dataclasses import dataclass, field

# what the names of faults begin with that only a Case with FULL graphs can show
OF_GRAPHS = "graph."


@dataclass(frozen=True)
class Edit:
    """Replace ``old`` by ``new``, once, in the source of one function.

    ``where`` is "module:qualified.name" with a module below replay_parity, or one of vLLM by its full name.
    """

    where: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A named fault. ``edits`` holds its form at each level that can show it.

    ``triton`` is its form in the Triton kernel, which the kernel level interprets as one of its targets.
    ``after_capture`` holds further edits of the engine level, planted once its graphs are captured. ``refusal``: words
    of the error that must be raised instead of a wrong result; None for a fault whose results must be seen to be wrong.
    ``targets``: by level, the target that runs what the fault changes, where the level's first one does not.
    """

    name: str
    what: str
    edits: dict[str, tuple[Edit, ...]]
    after_capture: tuple[Edit, ...] = ()
    refusal: str | None = None
    triton: tuple[Edit, ...] = ()
    targets: dict[str, str] = field(default_factory=dict)

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels that must catch it."""
        return tuple(self.edits)


def made(name: str, what: str, **edits: Edit | tuple[Edit, ...]) -> Fault:
    """A fault from one edit or several at each level."""
    return Fault(name, what, {level: e if isinstance(e, tuple) else (e,) for level, e in edits.items()})
