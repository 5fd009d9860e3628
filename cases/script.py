"""Codes of a drawn plan become a legal timeline, whatever the codes are: nothing is ever refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .case import Case, Step
from .timeline import prefix_root

EVENTS = ("none", "readmit", "preempt", "finish", "abort", "skip")
JOINS = ("none", "new", "resume", "both", "all")
CUTS = ("whole", "one_token_tail", "halves", "one_token_head", "one_token_middle", "two_token_tail", "ring")


@dataclass(frozen=True)
class Turn:
    """What one turn of a plan asks for; the defaults ask for the plainest step, in which everybody goes on.

    ``event`` befalls one running request, the ``who``-th, counted round: "readmit" preempts it and resumes it in the
    same step, "preempt" leaves it out, "finish" makes its row the last one, "abort" (also of a preempted request) ends
    it, "skip" gives it no row in this step. ``join``: who is admitted, a "new" request, one to "resume", "both", "all".
    ``cut``: into which chunks the prefills that begin in this turn are cut; "ring" is a first chunk of buffer_len.
    ``order`` permutes the decode rows. ``steps``: the step and plain ones behind it.
    """

    event: str = "none"
    who: int = 0
    join: str = "none"
    cut: str = "whole"
    order: int = 0
    steps: int = 1


def write_steps(template: Case, turns: Sequence[Turn], max_steps: int) -> Case:
    """The Case whose steps play ``turns`` with the requests of ``template``, whose own steps and outputs are ignored.

    At most ``max_steps`` steps and the few that are needed to end: a request that is decoding finishes with its last
    row, one in the middle of a prefill with the prefill, one that waits is resumed for a last token. There is always a
    row that runs as decode.
    Requests that no turn admitted are left out. What a turn asks for and cannot have is left out too.
    """
    writer = _Writer(template)
    for turn in turns:
        if not writer.turn(turn, max_steps):
            break
    return writer.end()


@dataclass
class _Request:
    """One request on its way: ``known`` tokens, of which ``computed`` are in the state.

    ``decoding``: its latest row sampled a token, so it may end there.
    """

    number: int
    known: int
    computed: int = 0
    outputs: int = 0
    status: str = "new"
    decoding: bool = False
    # sizes of the chunks to come, all but the last
    chunks: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.known - self.computed


@dataclass
class _Draft:
    """One step in the making; ``rows`` are (request, num_tokens, num_computed, admitted in this step)."""

    preempt: list[int] = field(default_factory=list)
    abort: list[int] = field(default_factory=list)
    rows: list[tuple[_Request, int, int, bool]] = field(default_factory=list)


class _Writer:
    def __init__(self, template: Case) -> None:
        self.case = template
        self.requests = [_Request(i, request.prompt_len) for i, request in enumerate(template.requests)]
        self.steps: list[Step] = []
        # "align": boundaries whose exact state is kept, by the identity of their prefix
        self.cached: set[tuple[int, int]] = set()
        self.block = template.cache.block_size if template.cache.mode == "align" else None
        self.runs_decode = False

    def turn(self, turn: Turn, max_steps: int) -> bool:
        """Play one turn; False where there is nobody left or no room."""
        for index in range(turn.steps):
            if len(self.steps) >= max_steps or not self._having("new", "running", "preempted"):
                return False
            self._step(turn if index == 0 else Turn(order=turn.order))
        return True

    def end(self) -> Case:
        """Bring every request to its end and put the Case together."""
        while unfinished := [r for r in self._having("running", "preempted") if not r.decoding]:
            self._play(_Draft(), unfinished, Turn())
        if not self.runs_decode:
            # a Case without decode tests nothing: someone who had a row in the last step goes one token on
            last = self.requests[self.steps[-1].rows[0][0]]
            last.status = "running"
            self._play(_Draft(), [last], Turn())
        requests = tuple(
            # who was aborted had asked for one token more at least
            replace(self.case.requests[r.number], output_len=r.outputs + (r.status == "aborted"))
            for r in self.requests
            if r.status != "new"
        )
        return replace(self.case, requests=requests, steps=tuple(self.steps))

    def _having(self, *statuses: str) -> list[_Request]:
        return [request for request in self.requests if request.status in statuses]

    def _step(self, turn: Turn) -> None:
        draft = _Draft()
        going = self._having("running")
        victim = self._victim(turn)
        if victim is not None and turn.event == "abort":
            victim.status = "aborted"
            draft.abort.append(victim.number)
        elif victim is not None and turn.event in ("preempt", "readmit"):
            victim.status, victim.decoding = "preempted", False
            draft.preempt.append(victim.number)
        elif victim is not None and turn.event == "skip":
            going.remove(victim)
        going = [request for request in going if request.status == "running"] + self._joining(turn, victim)
        self._play(draft, going or self._forced(victim), turn)
        if victim is not None and turn.event == "finish" and victim.decoding:
            victim.status = "finished"

    def _victim(self, turn: Turn) -> _Request | None:
        """Whom the event befalls; None where it would leave a step without rows, or hits nobody."""
        able = sorted(self._having("running"), key=lambda request: not request.decoding)
        who = turn.who
        if turn.event == "abort":
            # odd ones pick among those that wait
            waiting, who = self._having("preempted"), turn.who // 2
            able = [*waiting, *able] if turn.who % 2 else [*able, *waiting]
        if turn.event == "none" or not able:
            return None
        victim = able[who % len(able)]
        others = [request for request in self._having("new", "running", "preempted") if request is not victim]
        return victim if others or turn.event not in ("abort", "skip") else None

    def _joining(self, turn: Turn, victim: _Request | None) -> list[_Request]:
        most = {"none": (0, 0), "new": (1, 0), "resume": (0, 1), "both": (1, 1), "all": (None, None)}[turn.join]
        waiting = [request for request in self._having("preempted") if request is not victim]
        joining = self._having("new")[: most[0]] + waiting[: most[1]]
        return [*joining, victim] if victim is not None and turn.event == "readmit" else joining

    def _forced(self, victim: _Request | None) -> list[_Request]:
        """Who is admitted because nobody else has a row: a new one, that may take the victim's slot, comes first."""
        waiting = sorted(self._having("preempted"), key=lambda request: request is victim)
        return [*self._having("new"), *waiting, *self._having("running")][:1]

    def _play(self, draft: _Draft, going: Sequence[_Request], turn: Turn) -> None:
        """Give everybody in ``going`` a row: those that run as decode first, then by size, as Model Runner V2 does."""
        for request in going:
            admitted = request.status != "running"
            if admitted:
                request.status, request.computed = "running", self._hit(request)
                request.chunks = self._chunks(request.left, turn.cut)
            draft.rows.append((request, self._next_chunk(request), request.computed, admitted))
        rows = sorted(_permuted(draft.rows, turn.order), key=_batch_order)
        self.runs_decode |= not _batch_order(rows[0])[0]
        for request, num_tokens, _, _ in rows:
            request.computed += num_tokens
            request.decoding = request.left == 0
            request.known += request.decoding
            request.outputs += request.decoding
            if self.block is not None and request.computed % self.block == 0:
                self.cached.add(prefix_root(self.case, request.number, request.computed))
        played = tuple((request.number, num_tokens) for request, num_tokens, _, _ in rows)
        self.steps.append(Step(played, tuple(draft.preempt), tuple(draft.abort)))

    def _hit(self, request: _Request) -> int:
        """Tokens of the longest cached prefix that leaves a token to compute."""
        if self.block is None:
            return 0
        lengths = range((request.known - 1) // self.block * self.block, 0, -self.block)
        return next((n for n in lengths if prefix_root(self.case, request.number, n) in self.cached), 0)

    def _chunks(self, left: int, cut: str) -> list[int]:
        half = max(left // 2, 1)
        return {
            "whole": [],
            "one_token_tail": [left - 1],
            "halves": [half],
            "one_token_head": [1],
            "one_token_middle": [half, 1],
            "two_token_tail": [left - 2],
            "ring": [self.case.replay.buffer_len],
        }[cut]

    def _next_chunk(self, request: _Request) -> int:
        wanted = request.chunks.pop(0) if request.chunks else request.left
        # a prompt may be too short for its cut
        size = min(max(wanted, 1), request.left)
        return size if self.block is None else self._aligned(request, size, self.block)

    def _aligned(self, request: _Request, size: int, block: int) -> int:
        """The size nearest to ``size`` that ends on a block boundary or lies in the last partial block."""
        start, last = request.computed, request.known // block * block
        if start >= last:
            return size
        end = max((start + size) // block, start // block + 1) * block
        return end - start


def _permuted(rows: list[tuple[_Request, int, int, bool]], order: int) -> list[tuple[_Request, int, int, bool]]:
    """0: as they are, 1: from behind, others: turned round by that many."""
    if order == 1:
        return rows[::-1]
    turn = order % max(len(rows), 1)
    return rows[turn:] + rows[:turn]


def _batch_order(row: tuple[_Request, int, int, bool]) -> tuple[bool, int, bool]:
    """One-token rows over a state first, running requests before admitted ones; then first chunks by their size."""
    _, num_tokens, num_computed, admitted = row
    return num_tokens > 1 or num_computed == 0, num_tokens, admitted
