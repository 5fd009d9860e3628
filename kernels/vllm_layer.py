"""The GDN layer: decode rows go to the replay operator, everything else to stock code (on a CPU to `vllm_cpu`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.platforms import current_platform

from . import vllm_cpu
from .decode import gdn_replay_decode
from .ring import RingSpec
from .vllm_config import KEY, ReplayConfigError, ReplaySettings, replay_settings
from .vllm_metadata import ReplayBackend, ReplayMetadata


@dataclass(frozen=True)
class ReplayCounters:
    """Work done by the layers' Python code since the last reset, summed over layers; padding is not counted.

    A replayed CUDA graph runs no Python and so counts nothing: watch its steps through the builder's observer.
    """

    layer_calls: int = 0
    replay_rows: int = 0
    flush_rows: int = 0
    prefill_rows: int = 0


_counters = ReplayCounters()


def replay_counters() -> ReplayCounters:
    """Counts of this process since `reset_replay_counters`; host integers, no device read."""
    return _counters


def reset_replay_counters() -> None:
    """Start counting from zero."""
    global _counters
    _counters = ReplayCounters()


def _count(metadata: ReplayMetadata) -> None:
    global _counters
    _counters = replace(
        _counters,
        layer_calls=_counters.layer_calls + 1,
        replay_rows=_counters.replay_rows + metadata.num_replay_rows,
        flush_rows=_counters.flush_rows + metadata.num_flush_rows,
        prefill_rows=_counters.prefill_rows + metadata.num_prefills,
    )


class ReplayGatedDeltaNetAttention(QwenGatedDeltaNetAttention):  # type: ignore[misc]
    """GDN layer whose cache page holds (conv, state, ring d, ring k, ring g); stock where the switch is off.

    The CPU path was run; the CUDA path (`_decode_conv`, `_prefill` by stock code) was read from vLLM's source, not run.
    """

    # None while stock __init__ runs: it unpacks exactly two state dtypes
    replay: ReplaySettings | None = None

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = replay_settings(vllm_config)
        if settings is not None and current_platform.is_xpu():
            raise ReplayConfigError("platform", f"{KEY} has no XPU path", f"remove additional_config.{KEY}")
        super().__init__(config, vllm_config, *args, **kwargs)
        self.replay = settings

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of one slot's tensors; the ring's come after stock's two."""
        stock: tuple[tuple[int, ...], ...] = tuple(super().get_state_shape())
        if self.replay is None:
            return stock
        return stock + ring_shapes(stock[1], self.num_k_heads // self.tp_size, self.replay)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of one slot's tensors, in the order of `get_state_shape`."""
        stock: tuple[torch.dtype, ...] = tuple(super().get_state_dtype())
        return stock if self.replay is None else stock + ring_dtypes(self.replay)

    def get_attn_backend(self) -> Any:
        """Backend whose builder adds cursors."""
        return super().get_attn_backend() if self.replay is None else ReplayBackend

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """With replay on: the CUDA forward, which is plain torch around the op that calls `_forward_core`.

        An op, because under compilation the core must stay opaque: its Python branches on the step's row counts.
        """
        if self.replay is None:
            stock: torch.Tensor = super().forward_cpu(hidden_states)
            return stock
        out: torch.Tensor = self.forward_cuda(hidden_states)
        return out

    def forward_hip(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """With replay on: not the AITER path, which decodes without `_forward_core`."""
        if self.replay is None:
            stock: torch.Tensor = super().forward_hip(hidden_states)
            return stock
        out: torch.Tensor = self.forward_cuda(hidden_states)
        return out

    def _warmup_prefill_kernels(self, *args: Any, **kwargs: Any) -> None:
        """Stock warm-up, which unpacks exactly two state dtypes; nothing to warm on a CPU."""
        if self.replay is not None and args[0].device.type == "cpu":
            return
        settings, self.replay = self.replay, None
        try:
            super()._warmup_prefill_kernels(*args, **kwargs)
        finally:
            self.replay = settings

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Decode rows first in the batch, prefill rows behind them; all write their part of ``core_attn_out``."""
        metadata = self._step_metadata()
        if self.replay is None or metadata is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        _count(metadata)
        # num_decodes includes the padding rows of a FULL graph, one token each
        if metadata.num_decodes:
            rows = slice(0, metadata.num_decodes)
            self._decode(mixed_qkv[rows], b[rows], a[rows], core_attn_out[rows], metadata)
        if metadata.num_prefills:
            first = metadata.num_decode_tokens
            rows = slice(first, first + metadata.num_prefill_tokens)
            self._prefill(mixed_qkv[rows], b[rows], a[rows], core_attn_out[rows], metadata)

    def _step_metadata(self) -> Any:
        """This layer's metadata, None in a profile run."""
        metadata = get_forward_context().attn_metadata
        return metadata.get(self.prefix) if isinstance(metadata, dict) else None

    def _decode(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        metadata: ReplayMetadata,
    ) -> None:
        """One token per row: convolution, then the replay operator."""
        num_rows = len(mixed_qkv)
        slots = metadata.non_spec_state_indices_tensor[:num_rows]
        assert metadata.write_pos is not None and metadata.is_flush is not None
        q, k, v = self._split_heads(self._decode_conv(mixed_qkv, slots))
        _, state, ring_d, ring_k, ring_g = self.kv_cache
        gdn_replay_decode(
            q, k, v, a, b, self.A_log, self.dt_bias, state, ring_d, ring_k, ring_g,
            slots, metadata.write_pos[:num_rows], metadata.is_flush[:num_rows], out=core_attn_out,
        )  # fmt: skip

    def _decode_conv(self, mixed_qkv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        if mixed_qkv.device.type == "cpu":
            return vllm_cpu.conv_update(mixed_qkv, self._conv_state(), self._conv_weight(), self.conv1d.bias, slots)
        out: torch.Tensor = causal_conv1d_update(
            mixed_qkv,
            self._conv_state(),
            self._conv_weight(),
            self.conv1d.bias,
            self.activation,
            conv_state_indices=slots,
            validate_data=False,
        )
        return out

    def _prefill(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        metadata: ReplayMetadata,
    ) -> None:
        """Whole chunks; the ring of their slots is empty before and after."""
        chunks = metadata.prefill_only if metadata.prefill_only is not None else metadata
        if mixed_qkv.device.type != "cpu":
            with self._metadata_replaced(chunks):
                super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        slots = chunks.non_spec_state_indices_tensor
        lens, context = metadata.prefill_query_lens, metadata.prefill_has_context
        conv = vllm_cpu.conv_prefill(
            mixed_qkv, self._conv_state(), self._conv_weight(), self.conv1d.bias, slots, lens, context
        )
        q, k, v = self._split_heads(conv)
        out = vllm_cpu.delta_prefill(q, k, v, a, b, self.A_log, self.dt_bias, self.kv_cache[1], slots, lens, context)
        core_attn_out.copy_(out)

    @contextmanager
    def _metadata_replaced(self, metadata: Any) -> Iterator[None]:
        """Let stock code, which looks its metadata up in the forward context, see ``metadata`` for this layer."""
        context = get_forward_context()
        whole = context.attn_metadata
        context.attn_metadata = {**whole, self.prefix: metadata}
        try:
            yield
        finally:
            context.attn_metadata = whole

    def _conv_state(self) -> torch.Tensor:
        """[N, D, W-1] view of the convolution cache."""
        cache: torch.Tensor = self.kv_cache[0]
        return cache if is_conv_state_dim_first() else cache.transpose(-1, -2)

    def _conv_weight(self) -> torch.Tensor:
        """[D, W]; on a CPU vLLM may have packed the weight in place and kept the plain one aside."""
        plain: torch.Tensor | None = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        if plain is not None:
            return plain
        weight: torch.Tensor = self.conv1d.weight
        return weight.view(weight.size(0), weight.size(2))

    def _split_heads(self, mixed_qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [T, H, K] and v [T, HV, V], views of [T, D]."""
        key_dim = self.key_dim // self.tp_size
        q, k, v = mixed_qkv[:, :key_dim], mixed_qkv[:, key_dim : 2 * key_dim], mixed_qkv[:, 2 * key_dim :]
        num_tokens, K, V = len(mixed_qkv), self.head_k_dim, self.head_v_dim
        return (
            q.view(num_tokens, q.size(1) // K, K),
            k.view(num_tokens, k.size(1) // K, K),
            v.view(num_tokens, v.size(1) // V, V),
        )


def ring_shapes(
    state_shape: tuple[int, ...], num_k_heads: int, settings: ReplaySettings
) -> tuple[tuple[int, ...], ...]:
    """Shapes of a slot's ring (d, k, g) beside a state [HV, V, K]."""
    num_v_heads, head_v_dim, head_k_dim = state_shape
    spec = RingSpec(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
        buffer_len=settings.buffer_len,
        ring_dtype=settings.torch_ring_dtype,
        state_dtype=torch.float32,
    )
    return (spec.d_shape, spec.k_shape, spec.g_shape)


def ring_dtypes(settings: ReplaySettings) -> tuple[torch.dtype, ...]:
    """Dtypes of a slot's ring (d, k, g)."""
    return (settings.torch_ring_dtype, settings.torch_ring_dtype, torch.float32)


def install_layer() -> None:
    """Let vLLM build every Qwen GDN layer of this process as ours; again is a no-op."""
    if op_registry_oot.get(QwenGatedDeltaNetAttention.__name__) is not ReplayGatedDeltaNetAttention:
        QwenGatedDeltaNetAttention.register_oot(ReplayGatedDeltaNetAttention)
