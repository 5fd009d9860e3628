"""The engine level: a Case played by the real vLLM engine with the plugin, beside L = 1 and the sequential oracle."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cases.blocks import STATE_BLOCKS
from ..cases.case import Case
from ..cases.timeline import Timeline, play
from ..oracles.qwen3_5 import Qwen3_5Oracle
from .architectures import DEFAULT_ARCHITECTURE, known_architecture
from .checkpoint import VOCAB_SIZE, tiny_checkpoint
from .clear_tokens import clear_tokens
from .contract import Legs
from .cpu_platform import has_cuda
from .engine_pool import MOST_ENGINES, EnginePool
from .engine_process import EngineFailure, EngineProcess
from .engine_trace import UNKNOWN, EngineConfig, EngineTrace
from .execution import compiled_args
from .invariants import row_findings
from .levels import COMPILED_TARGET
from .oracle_path import ledger_cursors
from .three_leg import numeric_findings
from .trace import Cursors, Failure, Trace, row_index
from .trained import trained_checkpoint

BASELINE_LEN = 1
# float32 evaluations that a suspect Case is held against: the largest error of so many is no luck. At one token of a
# generated Case 16 of them were off by 0.6e-5 to 3.4e-5, the baseline by 0.65e-5 and the subject by 2.1e-5
EVALUATIONS = 16


class EnginePath:
    """Two engines play a Case, the subject's and the baseline's; those of earlier Cases stay open for later ones.

    target: "plugin", or "vllm-native" for a vLLM with GDN ReplaySSM of its own, which is driven by the same Cases and
    judged by its log-probabilities: cursors and memory are the plugin's to show; COMPILED_TARGET: the plugin in a model
    that vLLM compiles. ``engine_args``: more EngineArgs by name, for both engines, but that the baseline stays eager.
    ``architecture``: one of ARCHITECTURES; a multimodal one is asked for text alone.
    """

    level = "engine"

    def __init__(
        self,
        fault: str | None = None,
        target: str = "plugin",
        engine_args: tuple[tuple[str, Any], ...] = (),
        architecture: str = DEFAULT_ARCHITECTURE,
    ) -> None:
        self.fault, self.target, self.architecture = fault, target, architecture
        self.options: tuple[str, ...] = (
            *(("--target", target) if target != "plugin" else ()),
            *(("--architecture", architecture) if architecture != DEFAULT_ARCHITECTURE else ()),
            *(word for key, value in engine_args for word in ("--engine-arg", f"{key}={json.dumps(value)}")),
        )
        text_only = (("language_model_only", True),) if known_architecture(architecture).multimodal else ()
        self.engine_args = (*text_only, *(compiled_args(engine_args) if target == COMPILED_TARGET else engine_args))
        # on a GPU an engine takes its share of the memory as a whole
        most = 1 if has_cuda() else MOST_ENGINES
        self.subjects, self.baselines = EnginePool(fault, most), EnginePool(most=most)
        self.oracles: dict[Path, Qwen3_5Oracle] = {}

    def run(self, case: Case) -> Legs:
        """Truth from the oracle in float64; both engines play at the same time."""
        timeline = play(case)
        checkpoint = self._checkpoint(case)
        legs = self._legs(case, timeline, checkpoint)
        return replace(legs, execution=self._subject(case, checkpoint).execution)

    def _legs(self, case: Case, timeline: Timeline, checkpoint: Path) -> Legs:
        oracle = self._oracle(checkpoint)
        tokens = clear_tokens(case, oracle, VOCAB_SIZE)
        prompts, forced = _split(case, tokens)
        engines = (self._subject(case, checkpoint), self._baseline(case, checkpoint))
        pool = ThreadPoolExecutor(2)
        try:
            subject, baseline = (pool.submit(engine.play, case, prompts, forced) for engine in engines)
            truth = replace(_answers(timeline, oracle, tokens), cursors=ledger_cursors(case, timeline))
            legs = {"subject": subject.result(), "baseline": baseline.result()}
        except BaseException:
            # Ctrl-C: the pool would wait for both plays to end
            self.close()
            raise
        finally:
            pool.shutdown()
        traces: dict[str, Trace] = {}
        for name, played in legs.items():
            if isinstance(played, EngineFailure):
                left = _so_far(name, timeline, played)
                return Legs(self.level, case, timeline, truth, left, None, _failure(name, played))
            unlike = _unlike(timeline, played)
            if name == "subject":
                unlike = unlike or _unlike_graphs(timeline, played)
            if unlike is not None:
                failure = Failure("not_played", f"{name}: play", unlike)
                return Legs(self.level, case, timeline, truth, None, None, failure)
            trace = _trace(timeline, played)
            traces[name] = _unseen(case, timeline, trace) if self.native else trace
        plain = Legs(self.level, case, timeline, truth, traces["subject"], traces["baseline"])
        if not _is_off(plain):
            return plain
        others = tuple(_answers(timeline, oracle.nudged(seed), tokens) for seed in range(EVALUATIONS))
        return replace(plain, float32=others)

    def why_refused(self, case: Case) -> str | None:
        """Open the subject's engine for a Case; None where it opens, else vLLM's own words."""
        refused = self._subject(case, self._checkpoint(case)).start()
        return None if refused is None else refused.message

    def close(self) -> None:
        """End all engine processes."""
        self.subjects.close()
        self.baselines.close()

    @property
    def native(self) -> bool:
        """The subject is vLLM's own."""
        return self.target == "vllm-native"

    def _checkpoint(self, case: Case) -> Path:
        if case.inputs.regime == "trained":
            return trained_checkpoint()
        return tiny_checkpoint(case.geometry, architecture=self.architecture)

    def _oracle(self, checkpoint: Path) -> Qwen3_5Oracle:
        if checkpoint not in self.oracles:
            self.oracles[checkpoint] = Qwen3_5Oracle.load(checkpoint, dtype=torch.float64)
        return self.oracles[checkpoint]

    def _subject(self, case: Case, checkpoint: Path) -> EngineProcess:
        sizes = None if case.graphs is None else case.graphs.capture_sizes
        config = replace(self._config(case, checkpoint), buffer_len=case.replay.buffer_len, capture_sizes=sizes)
        if case.cache.num_blocks is not None:
            # tokens of one request that has all the blocks to itself: vLLM refuses to promise more
            longest = (case.cache.num_blocks - 1 - STATE_BLOCKS) * case.cache.block_size
            longest = min(longest, config.max_model_len)
            config = replace(config, num_blocks=case.cache.num_blocks, max_model_len=longest)
        return self.subjects.engine(config)

    def _baseline(self, case: Case, checkpoint: Path) -> EngineProcess:
        """Eager and with blocks enough: what graphs, or a shortage, do to both legs would not show."""
        config = self._config(case, checkpoint)
        return self.baselines.engine(replace(config, buffer_len=BASELINE_LEN, judged=False))

    def _config(self, case: Case, checkpoint: Path) -> EngineConfig:
        """What both engines are opened with."""
        return EngineConfig(
            checkpoint=checkpoint,
            ring_dtype=case.replay.ring_dtype,
            state_dtype=case.replay.state_dtype,
            cache_mode=case.cache.mode,
            block_size=case.cache.block_size if case.cache.mode == "align" else 0,
            extra=self.engine_args,
            native=self.native,
        )


def _unseen(case: Case, timeline: Timeline, trace: Trace) -> Trace:
    """A trace of an engine that shows no cursors: vLLM took the switch, so the ledger says which steps replayed."""
    cursors = ledger_cursors(case, timeline)
    counts = {"replay_steps": len(cursors.write_pos), "flushes": int(cursors.is_flush.sum())}
    return replace(trace, cursors=None, counts=counts)


def _split(case: Case, tokens: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    lengths = [request.prompt_len for request in case.requests]
    prompts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    return prompts, [row[length:] for row, length in zip(tokens, lengths, strict=True)]


def _sampled(timeline: Timeline) -> list[tuple[int, int, int, int]]:
    """(step, row, request, position) of every row after which a token is sampled."""
    return [
        (step, index, row.request, row.position)
        for step, entry in enumerate(timeline.steps)
        for index, row in enumerate(entry.rows)
        if row.samples
    ]


def _answers(timeline: Timeline, model: Qwen3_5Oracle, tokens: list[list[int]]) -> Trace:
    """What a sequential model says at every sampled row."""
    rows = row_index(_sampled(timeline))
    log_probs = [model.log_probs(row[:-1]) for row in tokens]
    return Trace(
        rows,
        torch.stack([log_probs[r][p] for r, p in zip(rows.request.tolist(), rows.position.tolist(), strict=True)]),
    )


def _is_off(legs: Legs) -> bool:
    """The subject's numbers are further off than the baseline's alone explain."""
    assert legs.truth is not None and legs.subject is not None and legs.baseline is not None
    unlike = row_findings(legs.truth, legs.subject) or row_findings(legs.truth, legs.baseline)
    return not unlike and bool(numeric_findings(legs)[1])


def _trace(timeline: Timeline, played: EngineTrace) -> Trace:
    places = {
        (step, row.request): index for step, entry in enumerate(timeline.steps) for index, row in enumerate(entry.rows)
    }
    columns = (played.step.tolist(), played.request.tolist(), played.position.tolist())
    found = [(step, places[step, request], request, position) for step, request, position in zip(*columns, strict=True)]
    order = sorted(range(len(found)), key=found.__getitem__)
    counts = {"replay_steps": played.counts.get("replay_rows", 0), "flushes": played.counts.get("flush_rows", 0)}
    return Trace(
        row_index([found[i] for i in order]),
        torch.from_numpy(played.log_probs[order]),
        cursors=_cursors(places, played),
        events=played.events,
        counts=counts,
        stock_reads=played.stock_reads,
    )


def _cursors(places: dict[tuple[int, int], int], played: EngineTrace) -> Cursors:
    rows = played.rows
    decoded = [i for i in range(len(rows)) if rows.ran_as_decode[i] == 1 and rows.write_pos[i] != UNKNOWN]
    keys = [(int(rows.step[i]), int(rows.request[i])) for i in decoded]
    entries = [
        (step, places[step, request], request, int(rows.num_computed[i] + rows.num_tokens[i] - 1))
        for i, (step, request) in zip(decoded, keys, strict=True)
    ]
    order = sorted(range(len(entries)), key=entries.__getitem__)
    picked = np.array([decoded[i] for i in order], np.int64)
    return Cursors(row_index([entries[i] for i in order]), rows.write_pos[picked], rows.is_flush[picked].astype(bool))


def _unlike(timeline: Timeline, played: EngineTrace) -> str | None:
    """The first row that the engine did not run as the Case has it, in words."""
    rows = played.rows
    got = {
        (int(rows.step[i]), int(rows.request[i])): (
            int(rows.num_tokens[i]),
            int(rows.num_computed[i]),
            int(rows.prefill_len[i]),
        )
        for i in range(len(rows))
    }
    want = {
        (step, row.request): (row.num_tokens, row.num_computed, row.prefill_len)
        for step, entry in enumerate(timeline.steps)
        for row in entry.rows
    }
    for key in sorted(want.keys() | got.keys()):
        if want.get(key) != got.get(key):
            step, request = key
            return (
                f"step {step}: request {request}: the engine ran (tokens, computed, prefill_len) {got.get(key)}, "
                f"the Case has {want.get(key)}"
            )
    return None


def _unlike_graphs(timeline: Timeline, played: EngineTrace) -> str | None:
    """The first step that did not run in the FULL graph that the Case has there, in words."""
    rows = played.rows
    for step, got in sorted(set(zip(rows.step.tolist(), rows.graph_rows.tolist(), strict=True))):
        want = timeline.steps[step].padded_to or 0
        if got != want:
            return f"step {step}: the engine ran it {_in_graph(got)}, the Case {_in_graph(want)}"
    return None


def _in_graph(rows: int) -> str:
    return f"in the graph of {rows} rows" if rows else "eagerly"


def _so_far(leg: str, timeline: Timeline, failed: EngineFailure) -> Trace | None:
    """What a subject left that raised in mid-play: its cursors may already be wrong."""
    if leg != "subject" or failed.trace is None:
        return None
    return _trace(timeline, failed.trace)


def _failure(leg: str, failed: EngineFailure) -> Failure:
    return Failure(failed.symptom, f"{leg}: {failed.stage}", failed.message)
