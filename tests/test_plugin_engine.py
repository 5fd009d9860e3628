"""How this tests, in plain words: the real vLLM engine decodes by replay and must agree with transformers.

This file is also a program that imports vLLM once and forks for each scenario: it runs engines on a tiny seeded
float32 checkpoint (Model Runner V2, on a CPU with Triton interpreted) and writes what it saw as JSON, for the tests.
Chunks of 8 tokens split a 9-token prompt into 8 + 1, so its tail runs as a leftover decode row, and a Scheduler
subclass preempts a request in mid-ring. Log-probabilities of the whole vocabulary are compared at every generated
position, each forced to follow the tokens the engine itself took. Engines are then run with faults planted, whose
errors must be large: the check is able to fail.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytestmark = pytest.mark.engine

TIMEOUT_S = 300
# observed at most 1.3e-5 over 10 engines (L 1, 4, 16; chunks, preemption, align); planted faults give 2.9 and 4.8
LOG_PROB_ATOL = 1e-4
PLANTED_AT_LEAST = 0.1


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each scenario wrote, by its name."""
    folder = tmp_path_factory.mktemp("seen")
    # one thread: the program forks
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False)
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()}


def test_replay_agrees_with_transformers_and_planted_faults_do_not(seen: dict[str, dict[str, Any]]) -> None:
    """L 16: leftover tail, mixed batches, a preemption and the decodes after it."""
    result = seen["replay"]
    assert max(result["clean"]) < LOG_PROB_ATOL
    # 2 prompts of 9 and 17, 16 tokens each, one resume: rows as the metadata builder counted them, times 3 layers
    assert result["counters"]["replay_rows"] == 3 * result["decode_rows"] > 0
    assert result["counters"]["flush_rows"] == 3 * result["flush_rows"] > 0
    assert result["counters"]["prefill_rows"] > 0
    assert result["leftover"] == {"write_pos": 0, "is_flush": True, "num_computed": 8, "decode_base": 9}
    assert result["resumed_base"] > 17, "no request was resumed: its base would be prompt + generated"
    assert max(result["prompt_base"]) > PLANTED_AT_LEAST
    assert max(result["leftover_append"]) > PLANTED_AT_LEAST


def test_baseline_leg_align_and_stock_in_one_process(seen: dict[str, dict[str, Any]]) -> None:
    """Engines after one another: L 1, L 4 with prefix caching across a block boundary, and no key at all.

    With align a third fault is planted: no flush where the block ends.
    """
    result = seen["several"]
    assert max(result["baseline"]) < LOG_PROB_ATOL
    assert result["baseline_counters"]["flush_rows"] == result["baseline_counters"]["replay_rows"] > 0
    assert max(result["align"]) < LOG_PROB_ATOL
    assert result["flushes"] == [127], "the decode that ends the block of 128 must flush, no other"
    assert result["hit"] == 128, "the second prompt must start from the block that decodes completed"
    assert max(result["after_hit"]) < LOG_PROB_ATOL
    assert max(result["align_no_flush"]) > PLANTED_AT_LEAST
    stock = result["stock"]
    assert stock["backend"] == "GDNAttentionBackend" and stock["builder"] == "GDNAttentionMetadataBuilder"
    assert stock["model_state"] == "MambaHybridModelState"
    assert stock["num_state_tensors"] == 2 and stock["shapes"] == stock["stock_shapes"]
    assert stock["layer_calls"] == 0 and stock["num_tokens"] == 4


def test_engine_refuses_at_start_and_without_a_base(seen: dict[str, dict[str, Any]]) -> None:
    """The guard's line reaches the caller; a builder that gets no decode base never guesses."""
    result = seen["several"]["refused"]
    assert result["speculation"] == ["ReplayConfigError", "speculative_config"]
    assert result["unknown_key"] == ["ReplayConfigError", "additional_config.gdn_replay.buffer_length"]
    assert result["v1"] == ["ReplayConfigError", "VLLM_USE_V2_MODEL_RUNNER"]
    assert result["no_base"] == ["ReplayMetadataError", "no decode base reached the GDN replay builder for this step"]


# --- the program --------------------------------------------------------------------------------------------------

Tokens = list[int]


def scheduler_class(preempt_at: set[int]) -> Any:
    """A Scheduler that preempts its first running request in the schedule() calls numbered in ``preempt_at``."""
    from vllm.v1.core.sched.scheduler import Scheduler

    class PreemptingScheduler(Scheduler):  # type: ignore[misc]
        calls = 0

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            if type(self).calls in preempt_at:
                request = self.running[0]
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
            return super().schedule(*args, **kwargs)

    return PreemptingScheduler


@contextlib.contextmanager
def engine(path: str, replay: dict[str, Any] | None, **changes: Any) -> Iterator[Any]:
    """An LLM on the checkpoint, shut down afterwards so that the next one can start."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    args = {
        "model": path,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "max_logprobs": -1,
        "enable_prefix_caching": False,
        "additional_config": {} if replay is None else {"gdn_replay": replay},
    }
    llm = LLM(**(args | changes))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: Sequence[Tokens], count: int) -> list[tuple[Tokens, Any]]:
    """Greedy tokens and log-probabilities [count, vocab] of each prompt."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=count, logprobs=-1, ignore_eos=True, detokenize=False)
    results = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False):
        rows = [[entry[token].logprob for token in range(len(entry))] for entry in output.outputs[0].logprobs]
        results.append((list(output.outputs[0].token_ids), np.array(rows)))
    return results


@functools.cache
def reference(path: str) -> Any:
    """transformers' model in float32."""
    import torch
    from transformers import Qwen3_5ForCausalLM

    return Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def errors(path: str, prompts: Sequence[Tokens], results: Sequence[tuple[Tokens, Any]]) -> list[float]:
    """Largest difference in log-probability to transformers, per prompt."""
    import torch

    model = reference(path)
    worst = []
    for prompt, (tokens, found) in zip(prompts, results, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits.double(), -1).numpy()
        worst.append(float(np.abs(expected - found).max()))
    return worst


def checkpoint() -> tuple[str, Any]:
    """Directory of the tiny checkpoint and a seeded generator for prompts."""
    from replay_parity.cases.geometry import Geometry
    from replay_parity.harness.checkpoint import tiny_checkpoint

    return str(tiny_checkpoint(Geometry(2, 4, 64, 64, 4))), np.random.default_rng(0)


def replay() -> dict[str, Any]:
    """One engine, three runs: clean, then of the 9-token prompt alone with a fault planted."""
    from replay_parity.kernels import vllm_layer, vllm_metadata, vllm_model_state
    from replay_parity.kernels.cursor import Cursor, decode_cursor

    path, draw = checkpoint()
    prompts = [draw.integers(0, 256, length).tolist() for length in (9, 17)]
    preempt_at: set[int] = set()
    scheduler = scheduler_class(preempt_at)
    snapshot = vllm_model_state.decode_base_snapshot

    def prompt_base(input_batch: Any) -> Any:
        base = snapshot(input_batch)
        # the 9-token prompt is the one that is resumed
        base[(base > 9) & (base != 17)] = 9
        return base

    def leftover_append(computed: Any, base: Any, *rest: Any) -> Cursor:
        right = decode_cursor(computed, base, *rest)
        return Cursor(write_pos=right.write_pos, is_flush=right.is_flush & (computed >= base))

    with engine(path, {"buffer_len": 16, "ring_dtype": "float32"}, scheduler_cls=scheduler) as llm:

        def run(prompts: list[Tokens], count: int) -> list[float]:
            preempt_at.add(scheduler.calls + 12)
            return errors(path, prompts, generate(llm, prompts, count))

        steps: list[Any] = []
        vllm_metadata.set_step_observer(steps.append)
        vllm_layer.reset_replay_counters()
        result: dict[str, Any] = {"clean": run(prompts, 16), "counters": asdict(vllm_layer.replay_counters())}
        vllm_metadata.set_step_observer(None)
        one_layer = [step for step in steps if step.layer_names == steps[0].layer_names]
        result["decode_rows"] = sum(int(step.runs_as_decode.sum()) for step in one_layer)
        result["flush_rows"] = sum(int(step.is_flush.sum()) for step in one_layer)
        leftover = next(step for step in one_layer if (step.num_computed < step.decode_base)[step.runs_as_decode].any())
        result["leftover"] = {
            "write_pos": int(leftover.write_pos[0]),
            "is_flush": bool(leftover.is_flush[0]),
            "num_computed": int(leftover.num_computed[0]),
            "decode_base": int(leftover.decode_base[0]),
        }
        result["resumed_base"] = max(int(step.decode_base.max()) for step in one_layer)
        with mock.patch.object(vllm_model_state, "decode_base_snapshot", prompt_base):
            result["prompt_base"] = run(prompts[:1], 14)
        with mock.patch.object(vllm_metadata, "decode_cursor", leftover_append):
            result["leftover_append"] = run(prompts[:1], 4)
    return result


def several() -> dict[str, Any]:
    """Engines with L 1, with align, and without the key, one after another."""
    from replay_parity.kernels import cursor, vllm_layer, vllm_metadata

    path, draw = checkpoint()
    prompts = [draw.integers(0, 256, length).tolist() for length in (9, 17)]
    result: dict[str, Any] = {"refused": refused(path)}
    vllm_layer.reset_replay_counters()
    baseline = {"buffer_len": 1, "ring_dtype": "float32"}
    with engine(path, baseline, scheduler_cls=scheduler_class({7})) as llm:
        result["baseline"] = errors(path, prompts, generate(llm, prompts, 8))
    result["baseline_counters"] = asdict(vllm_layer.replay_counters())

    steps: list[Any] = []
    vllm_metadata.set_step_observer(steps.append)
    changes = {"mamba_cache_mode": "align", "enable_prefix_caching": True, "max_num_batched_tokens": 128}
    # by default vLLM keeps only the state at the prompt's end; the block that decodes complete is wanted here
    changes["prefix_cache_retention_interval"] = 128
    with engine(path, {"buffer_len": 4, "ring_dtype": "float32"}, **changes) as llm:
        prompt = draw.integers(0, 256, 125).tolist()
        first = generate(llm, [prompt], 5)
        result["align"] = errors(path, [prompt], first)
        # base 125, L 4: without align the first flush would be at 128
        result["flushes"] = sorted({int(step.num_computed[0]) for step in steps if step.is_flush[0]})
        steps.clear()
        longer = prompt + first[0][0] + [1, 2, 3]
        result["after_hit"] = errors(path, [longer], generate(llm, [longer], 3))
        result["hit"] = int(steps[0].num_computed[0])
        vllm_metadata.set_step_observer(None)
        with mock.patch.object(cursor, "_ends_block", lambda computed, block: np.zeros_like(computed, dtype=bool)):
            prompt = draw.integers(0, 256, 125).tolist()
            longer = prompt + generate(llm, [prompt], 5)[0][0] + [1, 2, 3]
            result["align_no_flush"] = errors(path, [longer], generate(llm, [longer], 3))

    vllm_layer.reset_replay_counters()
    with engine(path, None, dtype="bfloat16") as llm:
        result["stock"] = describe(llm) | {"num_tokens": len(generate(llm, prompts[:1], 4)[0][0])}
    result["stock"]["layer_calls"] = vllm_layer.replay_counters().layer_calls
    return result


def describe(llm: Any) -> dict[str, Any]:
    """What the engine's first GDN layer, its builder and the model state are."""
    from vllm.v1.kv_cache_interface import MambaSpec

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    group = next(g for groups in runner.attn_groups for g in groups if isinstance(g.kv_cache_spec, MambaSpec))
    layer = runner.vllm_config.compilation_config.static_forward_context[group.layer_names[0]]
    model: Any = type(runner.model)
    stock = next(base for base in model.__mro__ if base.__module__.startswith("vllm."))
    return {
        "backend": group.backend.__name__,
        "builder": type(group.get_metadata_builder(0)).__name__,
        "model_state": type(runner.model_state).__name__,
        "num_state_tensors": len(layer.kv_cache),
        "shapes": [list(shape) for shape in model.get_mamba_state_shape_from_config(runner.vllm_config)],
        "stock_shapes": [list(shape) for shape in stock.get_mamba_state_shape_from_config(runner.vllm_config)],
    }


def refused(path: str) -> dict[str, Any]:
    """Starts that must fail, each with the type and the first words of its error."""
    from replay_parity.kernels.vllm_model import ReplayQwen3_5ForCausalLM
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    draft = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    result = {
        "unknown_key": attempt(path, {"buffer_length": 4}),
        "speculation": attempt(path, {"buffer_len": 4}, speculative_config=draft),
    }
    with mock.patch.dict(os.environ, {"VLLM_USE_V2_MODEL_RUNNER": "0"}):
        result["v1"] = attempt(path, {"buffer_len": 4})
    # as if only the guard had been relaxed: stock's model state sets no base
    with mock.patch.object(ReplayQwen3_5ForCausalLM, "get_model_state_cls", lambda self: MambaHybridModelState):
        result["no_base"] = attempt(path, {"buffer_len": 4})
    return result


def attempt(path: str, settings: dict[str, Any], **changes: Any) -> list[str]:
    """Type and text up to the first ': ' or ';' of the error that starting and running one step raises."""
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        with engine(path, settings, **changes) as llm:
            generate(llm, [[1, 2, 3]], 2)
    except Exception as error:
        # the traceback would keep the engine alive
        failure = error.with_traceback(None)
        gc.collect()
        cleanup_dist_env_and_memory()
        return [type(failure).__name__, str(failure).replace(";", ": ").split(": ")[0]]
    return ["nothing was raised", ""]


def replay_as_vllm_registers() -> dict[str, Any]:
    """The plugin's class as vLLM itself takes it: looked at in a fresh process of its own."""
    return replay()


def several_in_process() -> dict[str, Any]:
    """The class looked at here, as the harness does it: no further import of vLLM."""
    from replay_parity.harness import cpu_platform

    cpu_platform.inspect_in_process("Qwen3_5ForCausalLM")
    return several()


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {"replay": replay_as_vllm_registers, "several": several_in_process}


def run_forked(scenario: Callable[[], dict[str, Any]], file: Path) -> int:
    """Exit status of a scenario in a process of its own."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        file.write_text(json.dumps(scenario()), encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(folder: Path) -> int:
    """Run every scenario; the number of those that failed."""
    from replay_parity.harness import cpu_platform

    cpu_platform.prepare()
    import transformers.models.qwen3_5  # noqa: F401
    import vllm.v1.engine.llm_engine  # noqa: F401

    # an engine's start collects several times: not what was imported
    gc.collect()
    gc.freeze()
    return sum(run_forked(scenario, folder / f"{name}.json") != 0 for name, scenario in SCENARIOS.items())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
