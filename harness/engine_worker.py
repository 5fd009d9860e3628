"""The child process: one vLLM engine, many Cases. Reads Play messages, answers with an EngineTrace."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from ..cases.case import Case, Step
from ..cases.geometry import ENGINE_BLOCK
from ..cases.inputs import poisons
from . import cpu_platform
from .architectures import ARCHITECTURES
from .directed_scheduler import Direction, DirectionError, Director, directed_scheduler_class
from .engine_compile import how_it_runs, prepare_compiling
from .engine_interpreter import HelperKernels
from .engine_memory import EngineLayer, EngineMemory
from .engine_rows import RowLog
from .engine_slots import slot_events
from .engine_sync import watch_host_reads
from .engine_tokens import Tokens, TokensError, check_tokens
from .engine_trace import EngineConfig, EngineTrace
from .execution import execution_args
from .graphs import EngineGraphs, allow_graphs
from .trace import Event

# how often the child looks whether its parent is still there
_PARENT_POLL_S = 0.5


@dataclass(frozen=True)
class Born:
    """A forked child's first word: its process id."""

    pid: int


@dataclass(frozen=True)
class CannotFork:
    """The nursery's word in place of a child's: why it must not fork, in one line."""

    message: str


@dataclass(frozen=True)
class Opened:
    """The engine is up, with blocks of ``block_size`` tokens; ``execution``: vLLM's mode and cudagraph_mode."""

    block_size: int
    execution: dict[str, str]


@dataclass(frozen=True)
class Refused:
    """A Case that this engine did not play, in one line; the engine stays open."""

    message: str


@dataclass(frozen=True)
class Raised:
    """The child's last word before it exits: what was raised, in one line, and the Case under way as far as it came."""

    stage: Literal["start", "play"]
    message: str
    trace: EngineTrace | None = None


@dataclass(frozen=True)
class Play:
    """One Case to play: prompt token ids and forced output token ids of each request."""

    case: Case
    prompts: Sequence[Tokens]
    forced: Sequence[Tokens]


class Engine:
    """One open engine. Needs a process of its own: V2's settings and the plugin are fixed as vLLM is imported."""

    def __init__(self, config: EngineConfig, caches: Path | None = None) -> None:
        if not (config.checkpoint / "config.json").is_file():
            # vLLM would look for a model of that name on a hub
            raise FileNotFoundError(f"checkpoint: there is no config.json in {config.checkpoint}")
        import_engine()
        from vllm.v1.engine.llm_engine import LLMEngine

        self.config = config
        self.helper_kernels = HelperKernels()
        if config.capture_sizes is not None:
            allow_graphs()
        prepare_compiling(config, caches)
        self.llm: Any = LLMEngine.from_engine_args(_engine_args(config))
        core = self.llm.engine_core.engine_core
        self.scheduler: Any = core.scheduler
        self.director: Director = self.scheduler.director
        self.block_size = int(core.vllm_config.cache_config.block_size)
        self.num_groups = len(self.scheduler.kv_cache_config.kv_cache_groups)
        worker = core.model_executor.driver_worker.worker
        runner = worker.model_runner
        self.execution = how_it_runs(config, core.vllm_config, runner.model)
        self.memory = EngineMemory(_gdn_layers(runner), config.cache_mode == "align")
        self.vocab_size = int(core.vllm_config.model_config.get_vocab_size())
        if config.block_size and config.block_size != self.block_size:
            raise ValueError(
                f"block_size: this engine rounds {config.block_size} tokens to {self.block_size} (a block must hold a "
                f"page of GDN state); use {self.block_size} or a smaller buffer_len"
            )
        self.graphs: EngineGraphs | None = None
        # what the capture wrote: nothing may, no request is there
        self.at_capture: list[Event] = []
        if config.capture_sizes is not None:
            self.memory.snapshot()
            self.graphs = EngineGraphs(runner)
            self.at_capture = [
                replace(event, message=f"while graphs were captured: {event.message}")
                for event in self.memory.audit(0, (), (), ())
            ]
        self.sync = watch_host_reads(worker, config.judged)
        # False while a Case is under way, and after one that raised
        self.clean = False
        self.few_blocks: int | None = None
        self.log = RowLog(self.vocab_size)

    def play(self, case: Case, prompts: Sequence[Tokens], forced: Sequence[Tokens]) -> EngineTrace:
        """Play the steps of ``case``: ``prompts`` and ``forced`` hold token ids of each request, forced ones sampled.

        Whatever happened before in this engine does not matter: no request is left, the prefix cache is empty, GDN
        state and ring of every block hold the Case's poison. Raises TokensError for tokens that do not fit the Case,
        DirectionError for a step that the scheduler did not play as written; the engine can go on after either.
        """
        check_tokens(case, prompts, forced, self.vocab_size)
        if not self.clean:
            self._clean()
        self.clean = False
        # with NaN each freed block is poisoned anew
        self.director.on_release = self.memory.bury if poisons(case) == "nan" else None
        self.memory.spread_poison(case)
        self.few_blocks = case.cache.num_blocks
        self.sync.start()
        self.log = log = RowLog(self.vocab_size)
        before = _counters(self.config)
        ids = [self._add(request, prompts[request], forced[request]) for request in range(len(case.requests))]
        log.events += self.at_capture
        with log.observing(self.config), self.helper_kernels.of(case):
            for index, step in enumerate(case.steps):
                self._step(index, step, ids, log)
        after = _counters(self.config)
        self._clean()
        # a replayed graph runs no Python that could count
        counts = {name: after[name] - before[name] + log.in_graphs[name] for name in after}
        return replace(log.trace(counts, self.block_size), stock_reads=tuple(self.sync.stock))

    def so_far(self) -> EngineTrace:
        """The trace of a Case that raised: its rows up to and with the step that did, no counts."""
        return self.log.trace({}, self.block_size)

    def _add(self, request: int, prompt: Tokens, forced: Tokens) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=len(forced),
            logprobs=-1,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            trace_decode_token_ids=list(forced),
            output_kind=RequestOutputKind.DELTA,
        )
        engine_id: str = self.llm.add_request(str(request), {"prompt_token_ids": list(prompt)}, params)
        return engine_id

    def _step(self, index: int, step: Step, ids: list[str], log: RowLog) -> None:
        if step.abort:
            self.llm.abort_request([ids[request] for request in step.abort], internal=True)
        rows = tuple((ids[request], tokens) for request, tokens in step.rows)
        preempt = tuple(ids[request] for request in step.preempt)
        # with the Case's own few blocks vLLM has to come to each preemption by itself
        natural = self.few_blocks == self.config.num_blocks
        self.director.direct(index, Direction(rows, give_way=preempt) if natural else Direction(rows, preempt))
        numbers = {name: request for request, name in enumerate(ids)}
        try:
            outputs = self.llm.step()
        except DirectionError as error:
            # the engine's request ids are random
            raise DirectionError(index, str(numbers[error.request]), error.wanted, error.got) from None
        except Exception as error:
            graph_rows = self._graph_rows(index, log)
            log.events += self.sync.events(index, error)
            # what the rows of this step were told is most wanted now
            log.add_step(index, self.director.rows, numbers, graph_rows)
            raise
        # what a graph read comes first: the rest follows from it
        graph_rows = self._graph_rows(index, log)
        log.events += self.sync.events(index)
        if self.config.observed and self.config.judged:
            sent = self.director.rows
            log.events += slot_events(index, log.reported, sent, numbers, self.director.state_blocks)
            requests = [numbers[row.request_id] for row in sent]
            log.events += self.memory.audit(index, log.reported, requests, self.director.attention_blocks)
        log.add_step(index, self.director.rows, numbers, graph_rows)
        for output in outputs:
            log.add_output(index, int(output.request_id), output.outputs[0])

    def _graph_rows(self, index: int, log: RowLog) -> int:
        """Rows of the graph that the step replayed, 0 without one; what it read that was not the step's is logged."""
        if self.graphs is None:
            return 0
        log.events += self.graphs.events(index, log.reported)
        return self.graphs.take_rows()

    def _clean(self) -> None:
        self.director.rest()
        left = list(self.scheduler.requests)
        if left:
            self.llm.abort_request(left, internal=True)
        # the runner hears of finished requests with the next step
        while self.scheduler.has_requests():
            self.llm.step()
        if not self.scheduler.reset_prefix_cache():
            raise RuntimeError("blocks are still held after every request has ended")
        self.clean = True


def serve(connection: Connection, config: EngineConfig, fault: str | None, caches: Path | None) -> None:
    """Open an engine with ``fault`` planted and answer Play messages until the other side closes.

    ``caches``: a directory of this engine's own where it compiles its model.
    """
    from .faults import plant, plant_after_capture

    engine: Engine | None = None
    try:
        # a fault may sit in a module that imports vLLM
        cpu_platform.prepare()
        with plant(fault, "engine"):
            engine = Engine(config, caches)
            connection.send(Opened(engine.block_size, engine.execution))
            with plant_after_capture(fault):
                while (message := _receive(connection)) is not None:
                    connection.send(_answer(engine, message))
    except Exception as error:
        # the traceback goes to the log; it also keeps the engine alive, so the process ends here
        traceback.print_exc()
        sys.stderr.flush()
        if engine is None:
            connection.send(Raised("start", one_line(error)))
        else:
            connection.send(Raised("play", one_line(error), engine.so_far()))


def main() -> None:
    """Entry point of a spawned child: ``argv[1]`` is its connection's file descriptor, ``argv[2]`` its parent's pid."""
    connection = Connection(int(sys.argv[1]))
    # Ctrl-C ends the child at once: there is nothing to clean up
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ParentWatch(int(sys.argv[2]))
    serve_first(connection)
    sys.stdout.flush()
    # no engine teardown: it can take seconds, and the process owns nothing that outlives it
    os._exit(0)


def serve_first(connection: Connection) -> None:
    """Read which engine to open, then serve it."""
    config, fault, caches = connection.recv()
    serve(connection, config, fault, caches)


@cache
def import_engine() -> None:
    """Prepare this process and import vLLM with all that an engine's start would import; makes no thread."""
    cpu_platform.prepare()
    for name in ARCHITECTURES:
        cpu_platform.inspect_in_process(name)
    import vllm.v1.engine.llm_engine  # noqa: F401

    directed_scheduler_class()


class ParentWatch:
    """A thread that ends this process soon after its parent has gone."""

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="parent-watch")
        self.thread.start()

    def stop(self) -> None:
        """End the thread."""
        self.stopped.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.stopped.wait(_PARENT_POLL_S):
            if os.getppid() != self.parent:
                os._exit(1)


def _answer(engine: Engine, message: Play) -> EngineTrace | Refused:
    try:
        return engine.play(message.case, message.prompts, message.forced)
    except (TokensError, DirectionError) as error:
        return Refused(one_line(error))


def _receive(connection: Connection) -> Play | None:
    try:
        message = connection.recv()
    except EOFError:
        return None
    if not isinstance(message, Play):
        raise TypeError(f"expected a Play message, got {type(message).__name__}")
    return message


def one_line(error: Exception) -> str:
    """Type and text of an exception."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _engine_args(config: EngineConfig) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    caching = config.cache_mode == "align"
    args: dict[str, Any] = {
        "model": str(config.checkpoint),
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "seed": 0,
        "enable_prefix_caching": caching,
        "mamba_cache_mode": config.cache_mode,
        "mamba_ssm_cache_dtype": config.state_dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        # vLLM raises it where a page needs more; small blocks keep a case's memory, and its poison, small
        "block_size": config.block_size or ENGINE_BLOCK,
        "num_gpu_blocks_override": config.num_blocks,
        "scheduler_cls": directed_scheduler_class(),
        "async_scheduling": False,
        "disable_log_stats": True,
        "max_logprobs": -1,
        "enable_trace_replay": True,
    }
    if caching:
        # every boundary that a chunk or a decode ends on stays cached, not those of prompts alone
        args["prefix_cache_retention_interval"] = None
    if config.native:
        args |= {"use_replayssm": True, "replayssm_buffer_len": config.buffer_len}
    elif config.buffer_len is not None:
        ring = {"buffer_len": config.buffer_len, "ring_dtype": config.ring_dtype}
        args["additional_config"] = {"gdn_replay": ring}
    return EngineArgs(**(args | dict(config.extra) | execution_args(config)))


def _gdn_layers(runner: Any) -> list[EngineLayer]:
    """Every GDN layer with its cache tensors."""
    from vllm.v1.kv_cache_interface import MambaSpec

    layers = runner.vllm_config.compilation_config.static_forward_context
    names = [
        name
        for group in runner.kv_cache_config.kv_cache_groups
        if isinstance(group.kv_cache_spec, MambaSpec)
        for name in group.layer_names
    ]
    return [EngineLayer(name, tuple(layers[name].kv_cache)) for name in names]


def _counters(config: EngineConfig) -> dict[str, int]:
    if not config.observed:
        return {}
    from ..kernels.vllm_layer import replay_counters

    counters = replay_counters()
    return {"replay_rows": counters.replay_rows, "flush_rows": counters.flush_rows}
