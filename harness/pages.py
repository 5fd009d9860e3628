"""What lies in each state slot when a row runs, token by token: the checkpoint, the ring rows, what tenants left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..cases.timeline import Row, Timeline
from .trace import Cursors


class Token(NamedTuple):
    """One token of a Case."""

    request: int
    position: int

    def __str__(self) -> str:
        return f"token {self.position} of request {self.request}"


@dataclass
class Page:
    """One slot. ``checkpoint``: the last token folded in; ``ring``: by index, the token whose entry lies there.

    ``tenant``: who has it, or had it last. ``found``: the ring as it lay when the tenant came. ``former``: earlier
    tenants with their checkpoints, latest first; a request that left and came back is its own former tenant.
    """

    tenant: int | None = None
    checkpoint: Token | None = None
    ring: dict[int, Token] = field(default_factory=dict)
    found: dict[int, Token] = field(default_factory=dict)
    former: list[tuple[int, Token | None]] = field(default_factory=list)

    def admit(self, request: int) -> None:
        """A new tenant: nothing in the page has changed yet."""
        if self.tenant is not None:
            self.former.insert(0, (self.tenant, self.checkpoint))
        self.tenant, self.checkpoint, self.found = request, None, dict(self.ring)


def pages_before(timeline: Timeline, cursors: Cursors, step: int) -> dict[int, Page]:
    """The pages by slot as a correct run leaves them before the rows of ``step``, its admissions included."""
    pages = {slot: Page() for slot in range(1, timeline.num_slots)}
    right = dict(
        zip(
            cursors.rows.labels(),
            zip(cursors.write_pos.tolist(), cursors.is_flush.tolist(), strict=True),
            strict=True,
        )
    )
    for index, entry in enumerate(timeline.steps[: step + 1]):
        for row in entry.rows:
            _admit(pages, row)
        if index == step:
            break
        for place, row in enumerate(entry.rows):
            token, page = Token(row.request, row.position), pages[row.slot]
            write_pos, is_flush = right.get((index, place), (0, True))
            if is_flush:
                page.checkpoint = token
            else:
                page.ring[write_pos] = token
    return pages


def _admit(pages: dict[int, Page], row: Row) -> None:
    if row.admission or row.copy_from is not None:
        pages[row.slot].admit(row.request)
        if row.num_computed:
            # a copied checkpoint holds the request's own prefix, whoever computed it
            pages[row.slot].checkpoint = Token(row.request, row.num_computed - 1)
