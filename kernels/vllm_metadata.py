"""Backend, metadata and builder: each step's cursors beside what vLLM's GDN builder makes.

The builder works on host integers that Model Runner V2 hands over (query_start_loc_cpu, seq_lens_cpu_upper_bound and
the decode base from `vllm_model_state`); it reads no device tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from .cursor import Cursor, decode_cursor
from .vllm_config import KEY, replay_settings

Ints = NDArray[np.int64]


class ReplayMetadataError(RuntimeError):
    """A step reached the builder in a form from which no right cursor follows; the message says what is missing."""


@dataclass(frozen=True, eq=False)
class ReplayStep:
    """What one call of the builder was given and made of it, in batch order, for observers.

    ``num_reqs`` counts real rows; all arrays have ``num_reqs_after_padding`` entries. ``decode_base``,
    ``num_computed``, ``query_len``: tokens. ``write_pos``, ``is_flush``: 0 on rows that do not run as decode.
    ``runs_as_decode``: the row goes to the replay kernel. ``state_indices``: [num_reqs_after_padding] slots, a copy
    of the device tensor that the kernels read. ``layer_names``: the layers that this builder serves.
    """

    layer_names: tuple[str, ...]
    num_reqs: int
    num_reqs_after_padding: int
    decode_base: Ints
    num_computed: Ints
    query_len: Ints
    write_pos: NDArray[np.int32]
    is_flush: NDArray[np.bool_]
    runs_as_decode: NDArray[np.bool_]
    state_indices: torch.Tensor


_observer: Callable[[ReplayStep], None] | None = None


def set_step_observer(callback: Callable[[ReplayStep], None] | None) -> None:
    """Call ``callback`` with each step that any builder of this process builds; None stops it.

    A step is built once per KV cache group of GDN layers, for warm-up and graph capture too (decode_base is 0 there).
    """
    global _observer
    _observer = callback


@dataclass
class ReplayMetadata(GDNAttentionMetadata):  # type: ignore[misc]
    """GDN metadata plus the cursors of the step.

    ``write_pos`` [num_reqs] int32 and ``is_flush`` [num_reqs] bool are views of buffers that keep their address, so a
    captured FULL graph reads this step's values. The counts are host integers: rows without padding, flushes among
    them. ``prefill_query_lens`` and ``prefill_has_context`` describe the rows from ``num_decodes`` on, and
    ``prefill_only`` is stock metadata for just those rows where the batch is mixed.
    """

    write_pos: torch.Tensor | None = None
    is_flush: torch.Tensor | None = None
    num_replay_rows: int = 0
    num_flush_rows: int = 0
    prefill_query_lens: tuple[int, ...] = ()
    prefill_has_context: tuple[bool, ...] = ()
    prefill_only: GDNAttentionMetadata | None = None


class ReplayMetadataBuilder(GDNAttentionMetadataBuilder):  # type: ignore[misc]
    """vLLM's GDN builder, then the step's cursors copied into persistent buffers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        settings = replay_settings(vllm_config)
        if settings is None:
            raise ReplayMetadataError(f"the replay builder was made without additional_config.{KEY}")
        self.buffer_len = settings.buffer_len
        # "align" needs the exact state at each boundary of the mamba block, which the attention block may differ from
        self.align_block = kv_cache_spec.block_size if kv_cache_spec.mamba_cache_mode == "align" else None
        self.max_rows = max(vllm_config.scheduler_config.max_num_seqs, self.decode_cudagraph_max_bs)
        self.write_pos = torch.zeros(self.max_rows, dtype=torch.int32, device=device)
        self.is_flush = torch.zeros(self.max_rows, dtype=torch.bool, device=device)
        # [num_reqs_after_padding], set by the model state before each build and used up by it
        self.replayssm_decode_base_cpu: torch.Tensor | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> ReplayMetadata:
        """Stock metadata with this step's cursors; raises ReplayMetadataError where no decode base was set for it."""
        m = common_attn_metadata
        base = self._take_decode_base(m.num_reqs)
        stock = super().build(
            common_prefix_len, m, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build=fast_build
        )
        query_len = np.diff(m.query_start_loc_cpu[: m.num_reqs + 1].numpy()).astype(np.int64)
        num_computed = m.seq_lens_cpu_upper_bound[: m.num_reqs].numpy().astype(np.int64) - query_len
        cursor = self._cursor(stock.num_decodes, num_computed, base, query_len)
        self._stage(cursor)
        metadata = self._extend(stock, m, cursor, num_computed, query_len)
        if _observer is not None:
            _observer(_step(tuple(self.layer_names), metadata, cursor, base, num_computed, query_len))
        return metadata

    def _take_decode_base(self, num_reqs: int) -> Ints:
        base, self.replayssm_decode_base_cpu = self.replayssm_decode_base_cpu, None
        if base is None:
            raise ReplayMetadataError(
                "no decode base reached the GDN replay builder for this step; "
                "the model state must set replayssm_decode_base_cpu before each build (Model Runner V2 only)"
            )
        if base.shape[0] < num_reqs:
            raise ReplayMetadataError(f"the decode base has {base.shape[0]} rows, the step {num_reqs}")
        return base[:num_reqs].numpy().astype(np.int64)

    def _cursor(self, num_decodes: int, num_computed: Ints, base: Ints, query_len: Ints) -> Cursor:
        """Cursors of all rows, 0 behind the decode rows."""
        num_reqs = len(query_len)
        self._require_empty_rings(num_decodes, num_computed, base, query_len)
        rows = slice(0, num_decodes)
        decodes = decode_cursor(num_computed[rows], base[rows], query_len[rows], self.buffer_len, self.align_block)
        write_pos = np.zeros(num_reqs, dtype=np.int32)
        is_flush = np.zeros(num_reqs, dtype=np.bool_)
        write_pos[rows], is_flush[rows] = decodes.write_pos, decodes.is_flush
        return Cursor(write_pos=write_pos, is_flush=is_flush)

    def _require_empty_rings(self, num_decodes: int, num_computed: Ints, base: Ints, query_len: Ints) -> None:
        """Refuse a decode row behind a first chunk: run as prefill it would lose the tokens pending in its ring.

        V2 sorts running one-token rows before first chunks of one token, so this is a change in V2 if it happens.
        Base 0 marks warm-up rows.
        """
        behind = np.arange(len(query_len)) >= num_decodes
        suspects = np.flatnonzero(behind & (query_len == 1) & (base > 0))
        computed, anchors, ones = num_computed[suspects], base[suspects], query_len[suspects]
        pending = decode_cursor(computed, anchors, ones, self.buffer_len, self.align_block).write_pos
        if pending.any():
            row = int(suspects[np.argmax(pending > 0)])
            raise ReplayMetadataError(
                f"row {row} has tokens pending in its ring but stands behind a first chunk and would run as prefill "
                f"(num_computed {int(num_computed[row])}, decode base {int(base[row])})"
            )

    def _stage(self, cursor: Cursor) -> None:
        """Copy into the buffers that kernels and captured graphs read, zeros behind the step's rows."""
        num_reqs = len(cursor.write_pos)
        write_pos = np.zeros(self.max_rows, dtype=np.int32)
        is_flush = np.zeros(self.max_rows, dtype=np.bool_)
        write_pos[:num_reqs], is_flush[:num_reqs] = cursor.write_pos, cursor.is_flush
        async_tensor_h2d(write_pos, out=self.write_pos)
        async_tensor_h2d(is_flush, out=self.is_flush)

    def _extend(self, stock: Any, m: Any, cursor: Cursor, num_computed: Ints, query_len: Ints) -> ReplayMetadata:
        prefills = slice(stock.num_decodes, stock.num_decodes + stock.num_prefills)
        values = {field.name: getattr(stock, field.name) for field in fields(stock)}
        return ReplayMetadata(
            **values,
            write_pos=self.write_pos[: m.num_reqs],
            is_flush=self.is_flush[: m.num_reqs],
            num_replay_rows=int((query_len[: stock.num_decodes] > 0).sum()),
            num_flush_rows=int(cursor.is_flush.sum()),
            prefill_query_lens=tuple(int(length) for length in query_len[prefills]),
            prefill_has_context=tuple(bool(computed > 0) for computed in num_computed[prefills]),
            prefill_only=_prefill_only(stock, m) if stock.num_prefills and stock.num_decodes else None,
        )


class ReplayBackend(GDNAttentionBackend):  # type: ignore[misc]
    """GDN attention whose builder adds replay cursors."""

    @staticmethod
    def get_builder_cls() -> type[ReplayMetadataBuilder]:
        """The builder that each GDN cache group gets."""
        return ReplayMetadataBuilder


def _prefill_only(stock: Any, m: Any) -> Any:
    """Stock metadata of a mixed batch reduced to its prefill rows, whose tokens then start at 0."""
    first, last = stock.num_decodes, stock.num_decodes + stock.num_prefills
    query_start_loc_cpu = m.query_start_loc_cpu[first : last + 1] - stock.num_decode_tokens
    nums_dict, batch_ptr, token_chunk_offset_ptr = compute_causal_conv1d_metadata(
        query_start_loc_cpu, device=m.query_start_loc.device
    )
    has_initial_state = stock.prefill_has_initial_state[: stock.num_prefills]
    state_indices = stock.prefill_state_indices[: stock.num_prefills]
    query_start_loc = stock.prefill_query_start_loc[: stock.num_prefills + 1]
    return replace(
        stock,
        num_decodes=0,
        num_decode_tokens=0,
        num_actual_tokens=stock.num_prefill_tokens,
        has_initial_state=has_initial_state,
        prefill_has_initial_state=has_initial_state,
        non_spec_state_indices_tensor=state_indices,
        prefill_state_indices=state_indices,
        non_spec_query_start_loc=query_start_loc,
        prefill_query_start_loc=query_start_loc,
        nums_dict=nums_dict,
        batch_ptr=batch_ptr,
        token_chunk_offset_ptr=token_chunk_offset_ptr,
    )


def _step(
    layer_names: tuple[str, ...],
    metadata: ReplayMetadata,
    cursor: Cursor,
    base: Ints,
    num_computed: Ints,
    query_len: Ints,
) -> ReplayStep:
    rows = np.arange(len(query_len))
    assert metadata.non_spec_state_indices_tensor is not None
    return ReplayStep(
        layer_names=layer_names,
        num_reqs=int((query_len > 0).sum()),
        num_reqs_after_padding=len(query_len),
        decode_base=base.copy(),
        num_computed=num_computed.copy(),
        query_len=query_len.copy(),
        write_pos=cursor.write_pos.copy(),
        is_flush=cursor.is_flush.copy(),
        runs_as_decode=(rows < metadata.num_decodes) & (query_len > 0),
        state_indices=metadata.non_spec_state_indices_tensor[: len(query_len)].clone(),
    )
