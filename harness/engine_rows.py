"""Collects, step by step, what an engine scheduled, what the plugin's metadata said and what was sampled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .directed_scheduler import ScheduledRow
from .engine_trace import UNKNOWN, EngineConfig, EngineRows, EngineTrace, IntArray
from .trace import Event

_COLUMNS = tuple(EngineRows.__dataclass_fields__)
# columns that only the plugin's metadata can fill, by the field of its ReplayStep
_REPORTED = {
    "decode_base": "decode_base",
    "write_pos": "write_pos",
    "is_flush": "is_flush",
    "ran_as_decode": "runs_as_decode",
    "slot": "state_indices",
}


class RowLog:
    """One Case's record in the making."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows: list[dict[str, int]] = []
        self.sampled: list[tuple[int, int, int, int]] = []
        self.log_probs: list[npt.NDArray[np.float32]] = []
        # ReplaySteps since the last add_step, one a GDN group
        self.reported: list[Any] = []
        self.events: list[Event] = []
        # rows that ran inside FULL graphs, summed over layers
        self.in_graphs = {"replay_rows": 0, "flush_rows": 0}
        self.prefill_len: dict[int, int] = {}
        self.last_position: dict[int, int] = {}

    @contextlib.contextmanager
    def observing(self, config: EngineConfig) -> Iterator[None]:
        """Listen to the plugin's metadata builder inside the block; nothing to hear without the plugin."""
        if not config.observed:
            yield
            return
        from ..kernels.vllm_metadata import set_step_observer

        set_step_observer(self.reported.append)
        try:
            yield
        finally:
            set_step_observer(None)

    def add_step(
        self, step: int, scheduled: tuple[ScheduledRow, ...], numbers: Mapping[str, int], graph_rows: int = 0
    ) -> None:
        """Record the rows of one step; ``numbers`` maps the engine's request ids to the Case's.

        ``graph_rows``: rows of the FULL graph that was replayed, 0 where the step ran eagerly.
        """
        for index, row in enumerate(scheduled):
            request = numbers[row.request_id]
            if row.prefill_len is not None:
                self.prefill_len[request] = row.prefill_len
            self.last_position[request] = row.num_computed + row.num_tokens - 1
            entry = dict.fromkeys(_COLUMNS, UNKNOWN)
            entry |= {
                "step": step,
                "request": request,
                "num_tokens": row.num_tokens,
                "num_computed": row.num_computed,
                "prefill_len": self.prefill_len[request],
                "padded_to": len(scheduled),
                "graph_rows": graph_rows,
            }
            if self.reported:
                entry |= self._told(index, row, scheduled)
            self.rows.append(entry)
        if graph_rows:
            for told in self.reported:
                self.in_graphs["replay_rows"] += len(told.layer_names) * int(told.runs_as_decode.sum())
                self.in_graphs["flush_rows"] += len(told.layer_names) * int(told.is_flush.sum())
        self.reported.clear()

    def add_output(self, step: int, request: int, completion: Any) -> None:
        """Record the distributions and tokens of one request's vLLM CompletionOutput."""
        flat = completion.logprobs
        tokens = list(completion.token_ids)
        if len(tokens) != 1:
            raise RuntimeError(f"step {step}, request {request}: one token a step was expected, not {len(tokens)}")
        values = np.full(self.vocab_size, np.nan, np.float32)
        # the sampled token comes first and once more at its rank
        values[np.array(flat.token_ids)] = np.array(flat.logprobs, np.float32)
        if len(set(flat.token_ids)) != self.vocab_size:
            raise RuntimeError(f"step {step}, request {request}: {len(set(flat.token_ids))} log-probabilities only")
        self.log_probs.append(values)
        self.sampled.append((step, request, self.last_position[request], tokens[0]))

    def trace(self, counts: dict[str, int], block_size: int) -> EngineTrace:
        """Everything recorded, as columns."""
        log_probs = np.array(self.log_probs, np.float32).reshape(-1, self.vocab_size)
        step, request, position, token = np.array(self.sampled, np.int64).reshape(-1, 4).T
        columns = {name: np.array([row[name] for row in self.rows], np.int64) for name in _COLUMNS}
        argmax: IntArray = log_probs.argmax(axis=1).astype(np.int64)
        rows, events = EngineRows(**columns), tuple(self.events)
        return EngineTrace(log_probs, step, request, position, token, argmax, rows, counts, block_size, events)

    def _told(self, index: int, row: ScheduledRow, scheduled: tuple[ScheduledRow, ...]) -> dict[str, int]:
        """What the plugin's builder said of one row, from its first GDN group: others differ in slots alone."""
        told = self.reported[0]
        seen = (int(told.num_reqs), int(told.query_len[index]), int(told.num_computed[index]))
        if seen != (len(scheduled), row.num_tokens, row.num_computed):
            raise RuntimeError(
                f"row {index}: the metadata builder saw (rows, tokens, computed) = {seen}, the scheduler sent "
                f"{(len(scheduled), row.num_tokens, row.num_computed)}"
            )
        entry = {column: int(getattr(told, name)[index]) for column, name in _REPORTED.items()}
        entry["padded_to"] = int(told.num_reqs_after_padding)
        return entry
