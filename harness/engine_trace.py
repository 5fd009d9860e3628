"""What an engine is opened with and what playing one Case in it leaves behind; no vLLM, so both sides can hold it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .trace import Event

IntArray = npt.NDArray[np.int64]

# entries of EngineRows where nobody reported a value: a row that ran as prefill, or an engine without the plugin
UNKNOWN = -1


@dataclass(frozen=True)
class EngineConfig:
    """Everything that shapes one engine; two equal ones play a Case alike.

    ``buffer_len`` is the ring's length in tokens (1 is the baseline), None leaves vLLM's own GDN path in place (on a
    CPU it needs ``dtype`` bfloat16). ``state_dtype`` is vLLM's mamba_ssm_cache_dtype. ``cache_mode`` "none" or "align";
    ``block_size`` in tokens, 0 for the engine's own choice. ``num_blocks`` counts KV cache blocks. ``capture_sizes``:
    rows of the FULL graphs that decode steps run in, ascending; None runs everything eagerly. ``extra`` holds more
    EngineArgs by name. ``native``: vLLM's own GDN ReplaySSM (use_replayssm) decodes in place of the plugin's.
    ``judged``: its memory is audited and its host reads are watched; the baseline's outputs alone are looked at.
    """

    checkpoint: Path
    buffer_len: int | None = 16
    ring_dtype: str = "float32"
    state_dtype: str = "float32"
    dtype: str = "float32"
    cache_mode: str = "none"
    block_size: int = 0
    num_blocks: int = 256
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_model_len: int = 1024
    capture_sizes: tuple[int, ...] | None = None
    extra: tuple[tuple[str, Any], ...] = ()
    native: bool = False
    judged: bool = True

    @property
    def observed(self) -> bool:
        """Our plugin decodes, so its metadata and its memory can be watched."""
        return self.buffer_len is not None and not self.native


@dataclass(frozen=True)
class EngineRows:
    """Every row the engine ran, [M] each, step by step in the runner's batch order.

    ``step`` indexes Case.steps; ``num_computed`` tokens were in the state before the row; ``prefill_len`` tokens were
    handed to prefill at the request's latest (re)admission. From the plugin's own metadata, UNKNOWN where it reported
    none: ``decode_base``, ``write_pos``, ``is_flush`` (0 or 1), ``slot`` (state block of the first GDN group),
    ``ran_as_decode`` (0 or 1). ``padded_to`` is the step's number of rows after padding, ``graph_rows`` that of the
    FULL graph that was replayed, 0 where the step ran eagerly.
    """

    step: IntArray
    request: IntArray
    num_tokens: IntArray
    num_computed: IntArray
    prefill_len: IntArray
    decode_base: IntArray
    write_pos: IntArray
    is_flush: IntArray
    slot: IntArray
    ran_as_decode: IntArray
    padded_to: IntArray
    graph_rows: IntArray

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class EngineTrace:
    """Distributions and rows of one Case in one engine.

    ``log_probs`` [N, vocab] float32: log-softmax of the raw logits, one entry a sampled token. [N] each: ``step`` of
    the Case, ``request``, ``position`` (index of the token after which the distribution stands), ``token`` (what was
    appended: the forced one), ``argmax`` (what greedy sampling would have taken).
    ``counts``: replay_rows and flush_rows that the plugin's layers ran, summed over layers; inside a FULL graph, which
    runs no Python, as many as the step's metadata says. ``block_size``: tokens of one block of state. ``events``:
    writes where none may be, host reads of device values, and what a graph read that was not its step's.
    ``stock_reads``: host reads by vLLM's own code, which are not judged.
    """

    log_probs: npt.NDArray[np.float32]
    step: IntArray
    request: IntArray
    position: IntArray
    token: IntArray
    argmax: IntArray
    rows: EngineRows
    counts: dict[str, int] = field(default_factory=dict)
    block_size: int = 0
    events: tuple[Event, ...] = ()
    stock_reads: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.step)
