"""A vLLM engine in a child process that serves loads: every client at once, vLLM's own scheduler, no script."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

from . import cpu_platform
from .engine_interpreter import HelperKernels
from .engine_worker import ParentWatch, Raised, Refused, one_line

PROGRAM = "from replay_parity.harness.serving_child import main; main()"
_CHECK = "VLLM_GPU_SYNC_CHECK"


@dataclass(frozen=True)
class Load:
    """``clients`` requests at once, each of ``prompt_len`` random tokens, drawn from ``seed``, and ``output_len``."""

    clients: int
    prompt_len: int
    output_len: int
    seed: int = 0


@dataclass(frozen=True)
class Serving:
    """How an engine is opened: ``runner`` V1 or V2, replay with rings of ``buffer_len`` tokens or None without.

    ``largest`` load bounds rows and tokens; ``args`` are more EngineArgs by name.
    """

    runner: Literal["V1", "V2"]
    buffer_len: int | None
    checkpoint: Path
    dtype: str
    largest: Load
    args: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Ready:
    """The engine is up and has served the first load it was asked for.

    ``replay_rows``: rows that the plugin's builder sent to replay decode meanwhile.
    """

    replay_rows: int


@dataclass(frozen=True)
class Served:
    """One load: seconds between a client's output tokens, the mean over clients, and output tokens a second of all."""

    token_seconds: float
    tokens_per_second: float


class ServingEngine:
    """One open engine. Needs a process of its own: the runner is chosen as vLLM is imported."""

    def __init__(self, serving: Serving) -> None:
        _prepare(serving)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.serving = serving
        # V2's own kernels on a CPU
        self.helper_kernels = HelperKernels() if serving.runner == "V2" else None
        self.llm: Any = LLMEngine.from_engine_args(EngineArgs(**_engine_args(serving)))
        self._require_runner()

    def replay_rows(self, load: Load) -> int:
        """Serve a load and count the rows that the plugin sent to replay; also what warms an engine up."""
        if self.serving.buffer_len is None:
            self.serve(load)
            return 0
        from ..kernels.vllm_metadata import ReplayStep, set_step_observer

        counted: list[int] = []

        def count(step: ReplayStep) -> None:
            counted.append(int(step.runs_as_decode.sum()))

        set_step_observer(count)
        try:
            self.serve(load)
        finally:
            set_step_observer(None)
        return sum(counted)

    def serve(self, load: Load) -> Served:
        """Submit every client and step until all are done. Raises RuntimeError where a client got too few tokens."""
        for client, prompt in enumerate(_prompts(load)):
            self.llm.add_request(str(client), {"prompt_token_ids": prompt}, _sampling(load.output_len))
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        counts = dict.fromkeys(map(str, range(load.clients)), 0)
        started = time.perf_counter()
        while self.llm.has_unfinished_requests():
            outputs = self.llm.step()
            now = time.perf_counter()
            for output in outputs:
                first.setdefault(output.request_id, now)
                last[output.request_id] = now
                counts[output.request_id] += len(output.outputs[0].token_ids)
        seconds = time.perf_counter() - started
        if set(counts.values()) != {load.output_len}:
            raise RuntimeError(f"clients got {sorted(counts.values())} tokens, each was to get {load.output_len}")
        between = [(last[client] - first[client]) / (load.output_len - 1) for client in counts]
        return Served(float(np.mean(between)), load.clients * load.output_len / seconds)

    def _require_runner(self) -> None:
        """Raises RuntimeError where vLLM took another runner than it was told to."""
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        worker = self.llm.engine_core.engine_core.model_executor.driver_worker.worker
        runner = "V2" if isinstance(worker.model_runner, GPUModelRunner) else "V1"
        if runner != self.serving.runner:
            raise RuntimeError(f"vLLM took Model Runner {runner}, {self.serving.runner} was asked for")


def main() -> None:
    """Entry point: ``argv[1]`` is the connection's file descriptor, ``argv[2]`` the parent's pid.

    Reads a Serving and a Load to warm up with, answers Ready; then answers each Load with Served. In their place
    Refused where the configuration is none that vLLM or the plugin serves, Raised for every other error: its last word.
    """
    connection = Connection(int(sys.argv[1]))
    # Ctrl-C ends the child at once: there is nothing to clean up
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ParentWatch(int(sys.argv[2]))
    stage: Literal["start", "play"] = "start"
    try:
        serving, load = connection.recv()
        engine = ServingEngine(serving)
        connection.send(Ready(engine.replay_rows(load)))
        stage = "play"
        while True:
            connection.send(engine.serve(connection.recv()))
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        refused = stage == "start" and isinstance(error, (ValueError, NotImplementedError))
        connection.send(Refused(one_line(error)) if refused else Raised(stage, one_line(error)))
    sys.stdout.flush()
    # no engine teardown: it can take seconds, and the process owns nothing that outlives it
    os._exit(0)


def _prepare(serving: Serving) -> None:
    """This process for one of the runners. On a CPU V1 runs as vLLM has it there, without Triton.

    With Triton interpreted, which V2 needs, V1 would launch it too and take several times as long.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if serving.runner == "V2" else "0"
    asked = _CHECK in os.environ
    if serving.runner == "V2":
        cpu_platform.prepare()
    else:
        cpu_platform.prepare_stock()
    if not asked:
        # a check on every step is no part of serving
        os.environ.pop(_CHECK, None)
    config = json.loads((serving.checkpoint / "config.json").read_text(encoding="utf-8"))
    cpu_platform.inspect_in_process(config["architectures"][0])


def _engine_args(serving: Serving) -> dict[str, Any]:
    largest = serving.largest
    args: dict[str, Any] = {
        "model": str(serving.checkpoint),
        "skip_tokenizer_init": True,
        "dtype": serving.dtype,
        "seed": 0,
        "enable_prefix_caching": False,
        "mamba_ssm_cache_dtype": "float32",
        "max_num_seqs": largest.clients,
        "max_model_len": largest.prompt_len + largest.output_len,
        "disable_log_stats": True,
    }
    if serving.buffer_len is not None:
        args["additional_config"] = {"gdn_replay": {"buffer_len": serving.buffer_len, "ring_dtype": "float16"}}
    return args | dict(serving.args)


def _prompts(load: Load) -> list[list[int]]:
    random = np.random.default_rng(load.seed)
    # any token that every vocabulary has
    tokens: list[list[int]] = random.integers(1, 256, (load.clients, load.prompt_len)).tolist()
    return tokens


def _sampling(output_len: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
