"""A vLLM scheduler that plays a script: which requests run in a step, how many tokens each, who is preempted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

ANY_NUMBER = 2**31 - 1


class DirectionError(RuntimeError):
    """A step that vLLM's scheduler did not play as scripted; the message names step, request, wanted and got."""

    def __init__(self, step: int, request: str, wanted: str, got: str) -> None:
        super().__init__(f"step {step}, request {request}: wanted {wanted}, got {got}")
        self.step, self.request, self.wanted, self.got = step, request, wanted, got


@dataclass(frozen=True)
class Direction:
    """One step by engine request id: who is preempted first, then (request id, num_tokens) in batch order.

    ``give_way``: whom vLLM itself has to preempt in the step because blocks run out, the first one first.
    """

    rows: tuple[tuple[str, int], ...] = ()
    preempt: tuple[str, ...] = ()
    give_way: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> dict[str, int]:
        """Tokens of each request that has a row."""
        return dict(self.rows)


@dataclass(frozen=True)
class ScheduledRow:
    """What the scheduler handed to the runner for one request, in the runner's batch order.

    ``num_computed`` tokens were in the state before the step. ``prefill_len`` is set where the request was admitted or
    readmitted in this step: the number of tokens handed over to prefill, those already generated included.
    """

    request_id: str
    num_tokens: int
    num_computed: int
    prefill_len: int | None


@dataclass
class Director:
    """The script of the step to come and the record of the step that went, shared with the scheduler.

    ``on_release`` is told the ids of blocks that became free since the step before and hold no cached prefix, after
    this step's preemptions and before any of them is handed out again. ``attention_blocks``: what requests hold of KV
    cache groups that are not GDN, in this step.
    """

    step: int = 0
    direction: Direction = field(default_factory=Direction)
    rows: tuple[ScheduledRow, ...] = ()
    attention_blocks: frozenset[int] = frozenset()
    state_blocks: dict[tuple[str, str], int] = field(default_factory=dict)
    on_release: Callable[[list[int]], None] | None = None

    def direct(self, step: int, direction: Direction) -> None:
        """Set the script of the next call of schedule()."""
        self.step, self.direction, self.rows = step, direction, ()

    def rest(self) -> None:
        """Let the next steps schedule nothing: they only tell the runner who has finished."""
        self.direct(self.step, Direction())

    def wanted(self, request_id: str) -> int:
        """Tokens scripted for a request in this step, 0 if it has no row.

        Whoever is to give way may have all that it has left: it has to ask for a block to be refused one.
        """
        if request_id in self.direction.give_way:
            return ANY_NUMBER
        return self.direction.num_tokens.get(request_id, 0)


@cache
def directed_scheduler_class() -> type[Any]:
    """The Scheduler subclass to pass as ``scheduler_cls``; imports vLLM. Its ``director`` takes the script.

    vLLM decides as always (blocks, prefix hits, alignment); the script only lowers what it may schedule:

    - a running request without a row is skipped by granting it 0 tokens (scheduler.py: such a request is passed over);
    - a waiting one without a row is taken out of the queue for the step, because 0 tokens would end admission;
    - rows of running requests and then of admitted ones keep the script's order: where token counts tie this is the
      batch order of Model Runner V2, which sorts one-token rows first and then by token count, stably;
    - who is to give way comes last among the running ones, the first one very last: there vLLM looks for whom to
      preempt where a row lacks a block.
    """
    from vllm.v1.core.sched.request_queue import create_request_queue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

    class DirectedScheduler(Scheduler):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.director = Director()
            self.waiting: Any
            self._last_held: set[int] = set()
            groups = self.kv_cache_config.kv_cache_groups
            self._attention_groups = [
                index for index, group in enumerate(groups) if not isinstance(group.kv_cache_spec, MambaSpec)
            ]
            self._state_groups = [
                (index, group) for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, MambaSpec)
            ]

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            director = self.director
            for request_id in director.direction.preempt:
                self._force_preemption(request_id)
            self._tell_released()
            order = {request_id: index for index, request_id in enumerate(director.direction.num_tokens)}
            last = {request_id: -index for index, request_id in enumerate(director.direction.give_way)}
            self.running.sort(
                key=lambda request: (
                    order.get(request.request_id, len(order)),
                    last.get(request.request_id, -len(self.running)),
                )
            )
            later = self._keep_waiting(order)
            output = super().schedule(*args, **kwargs)
            for request in later:
                self.waiting.add_request(request)
            self._check(output)
            output.num_scheduled_tokens = {name: output.num_scheduled_tokens[name] for name in order}
            director.rows = _scheduled_rows(output, sort_batch_req_ids(output.num_scheduled_tokens, {}, 1))
            director.attention_blocks = frozenset(self._held_blocks(self._attention_groups))
            director.state_blocks = self._state_blocks(director.rows)
            self._last_held = self._held_blocks()
            return output

        def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
            wanted = self.director.wanted(request.request_id)
            granted: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, min(num_new_tokens, wanted))
            return granted

        def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
            wanted = min(num_new_tokens, self.director.wanted(request.request_id))
            if wanted == 0:
                return 0
            granted: int = super()._mamba_block_aligned_split(request, wanted, *args, **kwargs)
            return granted

        def _force_preemption(self, request_id: str) -> None:
            request = self.requests.get(request_id)
            if request is None or request not in self.running:
                status = "unknown" if request is None else str(request.status)
                raise DirectionError(self.director.step, request_id, "a running request to preempt", status)
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())

        def _keep_waiting(self, order: dict[str, int]) -> list[Any]:
            """Leave in the waiting queue, in script order, only whom this step admits; return the others."""
            everyone = list(self.waiting)
            admitted = [request for request in everyone if request.request_id in order]
            self.waiting = create_request_queue(self.policy)
            for request in sorted(admitted, key=lambda request: order[request.request_id]):
                self.waiting.add_request(request)
            return [request for request in everyone if request.request_id not in order]

        def _check(self, output: Any) -> None:
            for request_id, wanted in self.director.direction.rows:
                got = output.num_scheduled_tokens.get(request_id, 0)
                if got != wanted:
                    raise DirectionError(self.director.step, request_id, f"{wanted} tokens", self._why(request_id, got))
            direction = self.director.direction
            told, preempted = {*direction.preempt, *direction.give_way}, output.preempted_req_ids or set()
            for request_id in sorted(told ^ preempted):
                words = ("to be preempted", "it was not") if request_id in told else ("no preemption", "one")
                raise DirectionError(self.director.step, request_id, *words)

        def _why(self, request_id: str, got: int) -> str:
            request = self.requests.get(request_id)
            if request is None:
                return "no such request (finished, aborted or never added)"
            free = self.kv_cache_manager.block_pool.get_num_free_blocks()
            return (
                f"{got} ({request.status.name}, {request.num_computed_tokens} of {request.num_tokens} known tokens "
                f"computed or scheduled, {free} free blocks, at most {self.max_num_scheduled_tokens} tokens a step)"
            )

        def _held_blocks(self, groups: Sequence[int] | None = None) -> set[int]:
            """Blocks of these KV cache groups, of all if None, that requests hold."""
            # block 0 is the NULL block and belongs to nobody
            return {
                block
                for request_id in self.requests
                for group, blocks in enumerate(self.kv_cache_manager.get_block_ids(request_id))
                if groups is None or group in groups
                for block in blocks
                if block
            }

        def _state_blocks(self, rows: tuple[ScheduledRow, ...]) -> dict[tuple[str, str], int]:
            found = {}
            for row in rows:
                held = self.kv_cache_manager.get_block_ids(row.request_id)
                for index, group in self._state_groups:
                    spec = group.kv_cache_spec
                    last = row.num_computed + row.num_tokens - 1
                    column = last // spec.block_size if spec.mamba_cache_mode == "align" else 0
                    found[row.request_id, group.layer_names[0]] = held[index][column]
            return found

        def _tell_released(self) -> None:
            if self.director.on_release is None:
                return
            blocks = self.kv_cache_manager.block_pool.blocks
            gone = sorted(self._last_held - self._held_blocks())
            released = [block for block in gone if blocks[block].ref_cnt == 0 and blocks[block].block_hash is None]
            if released:
                self.director.on_release(released)

    return DirectedScheduler


def _scheduled_rows(output: Any, batch_order: list[str]) -> tuple[ScheduledRow, ...]:
    computed = dict(
        zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens, strict=True)
    )
    prefill_len = {}
    for new in output.scheduled_new_reqs:
        computed[new.req_id] = new.num_computed_tokens
        prefill_len[new.req_id] = len(new.prefill_token_ids)
    return tuple(
        ScheduledRow(name, output.num_scheduled_tokens[name], computed[name], prefill_len.get(name))
        for name in batch_order
    )
