"""Codes of a drawn plan become a legal timeline, whatever the codes are: nothing is ever refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .blocks import Blocks
from .case import Case, Step
from .split import Split, next_split, split_in_last_block
from .timeline import prefix_root

EVENTS = ("none", "readmit", "preempt", "finish", "abort", "skip")
# what no scheduler does by itself: with few blocks it alone says who gives way
FORCED = ("readmit", "preempt", "skip")
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


def write_steps(template: Case, turns: Sequence[Turn], max_steps: int, split: Split = split_in_last_block) -> Case:
    """The Case whose steps play ``turns`` with the requests of ``template``, whose own steps and outputs are ignored.

    At most ``max_steps`` steps and the few that are needed to end: a request that is decoding finishes with its last
    row, one in the middle of a prefill with the prefill, one that waits is resumed for a last token. There is always a
    row that runs as decode.
    Requests that no turn admitted are left out. What a turn asks for and cannot have is left out too. ``split``: where
    prefill chunks may end in "align" mode. With few KV cache blocks nobody is preempted or skipped but who has to give
    way to others.
    """
    writer = _Writer(template, split)
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


@dataclass(frozen=True)
class _Row:
    """A row to be: ``num_tokens`` of a request over ``num_computed``. ``waited``: its status before admission."""

    request: _Request
    num_tokens: int
    num_computed: int
    waited: str | None

    @property
    def tokens(self) -> int:
        return self.num_computed + self.num_tokens

    @property
    def in_batch(self) -> tuple[bool, int, bool]:
        """One-token rows over a state first, running requests before admitted ones; then first chunks by their size."""
        return self.num_tokens > 1 or self.num_computed == 0, self.num_tokens, self.waited is not None


@dataclass
class _Draft:
    """One step in the making."""

    preempt: list[int] = field(default_factory=list)
    abort: list[int] = field(default_factory=list)


class _Writer:
    def __init__(self, template: Case, split: Split) -> None:
        self.case, self.split = template, split
        self.requests = [_Request(i, request.prompt_len) for i, request in enumerate(template.requests)]
        self.steps: list[Step] = []
        # "align": boundaries whose exact state is kept, by the identity of their prefix
        self.cached: set[tuple[int, int]] = set()
        self.block = template.cache.block_size if template.cache.mode == "align" else None
        few = template.cache.num_blocks
        self.blocks = None if few is None else Blocks(few, template.cache.block_size)
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
        while unfinished := self._unfinished():
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

    def _unfinished(self) -> list[_Request]:
        """Who has tokens to compute; whoever is decoding has had its last row.

        New ones are left out, but not from among those that were admitted: their numbers would no longer hold.
        """
        for request in self._having("running"):
            if request.decoding:
                self._leave(request, "finished")
        latest = max((request.number for request in self.requests if request.status != "new"), default=0)
        return self._having("running", "preempted") + [r for r in self._having("new") if r.number < latest]

    def _having(self, *statuses: str) -> list[_Request]:
        return [request for request in self.requests if request.status in statuses]

    def _step(self, turn: Turn) -> None:
        draft = _Draft()
        going = self._having("running")
        victim = self._victim(turn)
        if victim is not None and turn.event == "abort":
            self._leave(victim, "aborted")
            draft.abort.append(victim.number)
        elif victim is not None and turn.event in ("preempt", "readmit"):
            victim.status, victim.decoding = "preempted", False
            draft.preempt.append(victim.number)
        elif victim is not None and turn.event == "skip":
            going.remove(victim)
        going = [request for request in going if request.status == "running"] + self._joining(turn, victim)
        self._play(draft, going or self._forced(victim), turn)
        if victim is not None and turn.event == "finish" and victim.decoding:
            self._leave(victim, "finished")

    def _leave(self, request: _Request, status: str) -> None:
        request.status = status
        if self.blocks is not None:
            self.blocks.release(request.number)

    def _victim(self, turn: Turn) -> _Request | None:
        """Whom the event befalls; None where it would leave a step without rows, or hits nobody."""
        able = sorted(self._having("running"), key=lambda request: not request.decoding)
        who = turn.who
        if turn.event == "abort":
            # odd ones pick among those that wait
            waiting, who = self._having("preempted"), turn.who // 2
            able = [*waiting, *able] if turn.who % 2 else [*able, *waiting]
        if turn.event == "none" or not able or (self.blocks is not None and turn.event in FORCED):
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
        asked = [self._row(request, turn.cut) for request in going]
        asked = sorted(_permuted(asked, turn.order), key=lambda row: row.in_batch)
        rows = self._with_blocks(self._with_ready_hits(asked), draft)
        self.runs_decode |= not rows[0].in_batch[0]
        for row in rows:
            request = row.request
            request.computed = row.tokens
            request.decoding = request.left == 0
            request.known += request.decoding
            request.outputs += request.decoding
        self.cached |= self._boundaries(rows)
        played = tuple((row.request.number, row.num_tokens) for row in rows)
        self.steps.append(Step(played, tuple(draft.preempt), tuple(draft.abort)))

    def _row(self, request: _Request, cut: str) -> _Row:
        waited = None if request.status == "running" else request.status
        if waited is not None:
            request.status, request.computed = "running", self._hit(request, self.cached)
            request.chunks = self._chunks(request.left, cut)
        return _Row(request, self._next_chunk(request), request.computed, waited)

    def _with_ready_hits(self, rows: list[_Row]) -> list[_Row]:
        """Without whom a state serves best that this step writes or another one starts from: vLLM lets those wait."""
        kept = []
        taken = self._boundaries([row for row in rows if row.waited is None])
        for row in rows:
            if row.waited is not None:
                best = self._hit(row.request, self.cached | taken)
                if best and prefix_root(self.case, row.request.number, best) in taken:
                    row.request.status = row.waited
                    continue
                if best:
                    taken.add(prefix_root(self.case, row.request.number, best))
            taken |= self._boundaries([row])
            kept.append(row)
        return kept

    def _with_blocks(self, rows: list[_Row], draft: _Draft) -> list[_Row]:
        """Without those that give way, and without whom there are no blocks for; those wait."""
        if self.blocks is None:
            return rows
        gone = self.blocks.schedule([(row.request.number, row.tokens) for row in rows if row.waited is None])
        draft.preempt += gone
        kept = []
        for row in rows:
            request = row.request
            if request.number in gone:
                request.status, request.decoding = "preempted", False
            elif row.waited is None or (not gone and self.blocks.admit(request.number, request.known, row.tokens)):
                kept.append(row)
            else:
                request.status = row.waited
        return kept

    def _boundaries(self, rows: Sequence[_Row]) -> set[tuple[int, int]]:
        """Block boundaries that these rows end on."""
        if self.block is None:
            return set()
        ends = [(row.request.number, row.tokens) for row in rows if row.tokens % self.block == 0]
        return {prefix_root(self.case, *end) for end in ends}

    def _hit(self, request: _Request, cached: set[tuple[int, int]]) -> int:
        """Tokens of the longest cached prefix that leaves a token to compute."""
        if self.block is None:
            return 0
        lengths = range((request.known - 1) // self.block * self.block, 0, -self.block)
        return next((n for n in lengths if prefix_root(self.case, request.number, n) in cached), 0)

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
        if self.block is None:
            return size
        prompt_len = self.case.requests[request.number].prompt_len
        return next_split(self.split, request.computed, size, prompt_len, request.known, self.block)


def _permuted(rows: list[_Row], order: int) -> list[_Row]:
    """0: as they are, 1: from behind, others: turned round by that many."""
    if order == 1:
        return rows[::-1]
    turn = order % max(len(rows), 1)
    return rows[turn:] + rows[:turn]
