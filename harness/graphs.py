"""FULL CUDA graphs in an open engine: vLLM's own manager captures, dispatches and replays; here is what it needs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .cpu_platform import has_cuda
from .graph_audit import GraphAudit
from .graph_recorder import Graph, HostCalls, capture
from .trace import Event

# results of these go into an attention kernel for CPUs and are made by the host for each step
_HOST_CALLS = frozenset(("_C::get_scheduler_metadata",))


def graph_config(capture_sizes: Sequence[int]) -> dict[str, Any]:
    """CompilationConfig of an engine with a FULL graph for decode steps of each of these numbers of rows.

    The model in them is as it is, not compiled, unless the user asks for another mode.
    """
    return {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": list(capture_sizes),
        "max_cudagraph_capture_size": max(capture_sizes),
    }


def allow_graphs() -> None:
    """Let vLLM's CPU platform have graphs; call before the engine is made. With CUDA it has them anyway.

    Holds for the whole process, which has one engine.
    """
    if has_cuda():
        return
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.workspace import init_workspace_manager

    update = CpuPlatform.check_and_update_config.__func__

    def keep_sizes(cls: Any, vllm_config: Any) -> None:
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes
        update(cls, vllm_config)
        vllm_config.compilation_config.cudagraph_capture_sizes = sizes

    CpuPlatform.support_static_graph_mode = classmethod(lambda cls: True)
    CpuPlatform.check_and_update_config = classmethod(keep_sizes)
    CpuPlatform.graph_pool_handle = classmethod(lambda cls: (0, 0))
    CPUAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport.ALWAYS
    # nothing here can be disturbed by a collection, and freezing would undo the nursery's
    os.environ["VLLM_ENABLE_CUDAGRAPH_GC"] = "1"
    init_workspace_manager(torch.device("cpu"))


class EngineGraphs:
    """The FULL graphs of one engine, captured anew with an audit of what they read.

    ``runner`` is V2's model runner. Its model state and its graph manager are listened to, on a CPU and on a GPU alike.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.audit = GraphAudit()
        self.capturing = False
        # rows of the graph that the last step replayed, 0 where it ran eagerly
        self.rows = 0
        self.found: list[str] = []
        self._metadata: dict[str, Any] = {}
        self._slots: dict[str, torch.Tensor] = {}
        self._listen()
        self._capture()

    def events(self, step: int, reported: Sequence[Any]) -> list[Event]:
        """What the step's graph read that is not the step's, since the last call.

        ``reported``: the plugin's ReplaySteps, one a GDN group.
        """
        found, self.found = self.found, []
        if self.rows:
            found += self.audit.untold(self.rows, reported, self._slots)
        return [Event("stale_graph", step, None, message) for message in found]

    def take_rows(self) -> int:
        """Rows of the graph that the step replayed, 0 where it ran eagerly; 0 again afterwards."""
        rows, self.rows = self.rows, 0
        return rows

    def _listen(self) -> None:
        state, manager = self.runner.model_state, self.runner.cudagraph_manager
        prepare, replay = state.prepare_attn, manager.run_fullgraph

        def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = prepare(input_batch, *args, **kwargs)
            # in V2's order: mode, block tables, slot mappings, groups of layers
            _, tables, _, groups, *_ = args
            self._metadata = metadata
            if self.capturing:
                self.audit.remember(input_batch.num_reqs_after_padding, metadata)
            else:
                self._slots = self._state_blocks(input_batch, tables, groups)
            return metadata

        def run_fullgraph(desc: Any) -> Any:
            self.rows = desc.num_reqs
            self.found += self.audit.moved(desc.num_reqs, self._metadata)
            return replay(desc)

        state.prepare_attn, manager.run_fullgraph = prepare_attn, run_fullgraph

    def _state_blocks(self, input_batch: Any, tables: Any, groups: Any) -> dict[str, torch.Tensor]:
        """The block of each row's state by the first layer of each GDN group, NULL in padded rows."""
        from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
        from vllm.v1.kv_cache_interface import MambaSpec

        rows, mode = input_batch.num_reqs, self.runner.cache_config.mamba_cache_mode
        found = {}
        for table, members in zip(tables, groups, strict=True):
            for group in members:
                if isinstance(group.kv_cache_spec, MambaSpec):
                    blocks = mamba_get_block_table_tensor(
                        table[:rows], input_batch.seq_lens[:rows], group.kv_cache_spec, mode
                    )
                    padded = torch.zeros_like(table[: input_batch.num_reqs_after_padding, 0])
                    padded[:rows] = blocks[:, 0]
                    found[group.layer_names[0]] = padded
        return found

    def _capture(self) -> None:
        manager = self.runner.cudagraph_manager
        # on a GPU the engine's start has captured, but nobody looked
        manager.release_graphs()
        self.capturing = True
        try:
            with contextlib.nullcontext() if has_cuda() else _emulated():
                self.runner.capture_model()
        finally:
            self.capturing = False


@contextlib.contextmanager
def _emulated() -> Iterator[None]:
    """Graphs captured inside are recordings."""
    with HostCalls(_HOST_CALLS) as host:

        @contextlib.contextmanager
        def graph(recording: Graph, *args: Any, **kwargs: Any) -> Iterator[None]:
            with capture(recording, host):
                yield

        stock = {"CUDAGraph": torch.cuda.CUDAGraph, "graph": torch.cuda.graph}
        _set(torch.cuda, CUDAGraph=Graph, graph=graph)
        try:
            yield
        finally:
            _set(torch.cuda, **stock)


def _set(holder: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(holder, name, value)
