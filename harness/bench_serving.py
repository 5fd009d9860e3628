"""What serving costs with Model Runner V1 and V2, replay off and on: every client at once, vLLM's own scheduler.

Each setting has an engine in a child process, all of them open at a time; their rounds take turns, so that a ratio is
of the same minutes. What vLLM or the plugin refuses is said in a line. The CPU branch was run; the CUDA one (a larger
model with dummy weights, graphs as vLLM takes them) was written without a device to run it on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from ..cases.geometry import ENGINE, QWEN3_5
from .checkpoint import Shape, model_config, tiny_checkpoint
from .cpu_platform import has_cuda, why_no_engine
from .engine_children import SpawnedChild
from .engine_worker import Raised, Refused
from .figure import Figure, Note, NothingToMeasure
from .serving_child import PROGRAM, Load, Ready, Served, Serving

ROUNDS = 3
BUFFER_LEN = 16
# seconds; with CUDA a start compiles the model and captures graphs
START_TIMEOUT, LOAD_TIMEOUT = 600.0, 300.0

# stock GDN on a CPU takes bfloat16 only, so that is what all settings are compared in
DTYPE = "bfloat16"
CPU_LOADS = (Load(1, 32, 16), Load(8, 32, 16))
GPU_LOADS = (Load(1, 512, 128), Load(64, 512, 128))
# about the published 2 B text model with a smaller vocabulary; timing does not depend on the weights
GPU_SHAPE = Shape(
    vocab_size=32768,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
)
_SETTINGS: tuple[tuple[Literal["V1", "V2"], int | None], ...] = (
    ("V1", None),
    ("V1", BUFFER_LEN),
    ("V2", None),
    ("V2", BUFFER_LEN),
)


@dataclass
class Runner:
    """One setting: its child, what each load came to in each round, and why there is nothing where there is not.

    ``refused`` is the engine's word as it started; ``failed`` what must not happen: a crash, a hang, an error later.
    """

    serving: Serving
    child: SpawnedChild | None = None
    served: dict[Load, list[Served]] = field(default_factory=dict)
    refused: str = ""
    failed: str = ""
    program: str = PROGRAM

    @property
    def name(self) -> str:
        """For a person: V2, replay L 16."""
        return f"{self.serving.runner}, replay {_length(self.serving.buffer_len)}"

    def start(self, load: Load) -> None:
        """Open the engine and let it serve a load untimed."""
        self.child = SpawnedChild(self.program)
        answer = self._ask((self.serving, load), START_TIMEOUT)
        if isinstance(answer, Refused):
            self.refused = answer.message
        elif isinstance(answer, Raised):
            self.failed = answer.message
        elif isinstance(answer, Ready) and self.serving.buffer_len is not None and not answer.replay_rows:
            self.failed = "replay was switched on and no row was decoded by it"

    def serve(self, load: Load) -> None:
        """One round, where the engine is open."""
        if self.refused or self.failed:
            return
        answer = self._ask(load, LOAD_TIMEOUT)
        if isinstance(answer, Served):
            self.served.setdefault(load, []).append(answer)
        elif isinstance(answer, Raised):
            self.failed = answer.message

    def close(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.end()

    def _ask(self, message: object, timeout: float) -> Any:
        assert self.child is not None
        try:
            return self.child.ask(message, timeout)
        except TimeoutError:
            self.failed = f"no answer within {timeout:g} s"
        except (EOFError, OSError):
            self.failed = self.child.how_it_ended()
        return None


def bench_serving(seed: int) -> list[Figure | Note]:
    """Milliseconds between a client's tokens and output tokens a second of each setting, and replay beside none."""
    why = why_no_engine()
    if why is not None:
        raise NothingToMeasure(why)
    cuda = has_cuda()
    loads = [replace(load, seed=seed) for load in (GPU_LOADS if cuda else CPU_LOADS)]
    with tempfile.TemporaryDirectory(prefix="replay-parity-serving-") as folder:
        settings = _on_cuda(Path(folder), loads[-1]) if cuda else _on_cpu(loads[-1])
        # two at a time start on a CPU; engines that share a GPU measure its free memory as they start
        runners = measure(settings, loads, starting=1 if cuda else 2)
    notes = [Note("all settings", _conditions(loads[0], cuda))]
    if not cuda:
        notes.append(Note("V2 on a CPU", "its helper kernels are Triton, interpreted: no figure of a GPU's"))
    return [*notes, *lines(runners, loads)]


def measure(settings: Sequence[Serving], loads: Sequence[Load], starting: int) -> list[Runner]:
    """Every setting on every load, ROUNDS times in turn; ``starting`` engines start side by side."""
    runners = [Runner(serving) for serving in settings]
    with ExitStack() as stack:
        for runner in runners:
            stack.callback(runner.close)
        with ThreadPoolExecutor(starting) as pool:
            # to its end, errors included
            list(pool.map(lambda runner: runner.start(loads[0]), runners))
        for _ in range(1 + ROUNDS):
            for load in loads:
                for runner in runners:
                    runner.serve(load)
    for runner in runners:
        for served in runner.served.values():
            # the first one warmed up
            del served[0]
    return runners


def lines(runners: Sequence[Runner], loads: Sequence[Load]) -> list[Figure | Note]:
    """Figures by load, then what was not measured. Raises NothingToMeasure where nothing was."""
    figures: list[Figure | Note] = []
    for load in loads:
        for runner in runners:
            if len(runner.served.get(load, ())) == ROUNDS:
                figures += _figures(f"C{load.clients}, {runner.name}", runner.served[load])
        figures += _ratio(runners, load)
    notes = [_not_measured(runner) for runner in runners if runner.refused or runner.failed]
    if not figures:
        raise NothingToMeasure("; ".join(note.line for note in notes))
    return [*figures, *notes]


def _figures(name: str, served: Sequence[Served]) -> list[Figure]:
    return [
        _figure(f"{name}, time per output token", [1e3 * one.token_seconds for one in served], "ms"),
        _figure(f"{name}, output tokens", [one.tokens_per_second for one in served], "tokens/s"),
    ]


def _ratio(runners: Sequence[Runner], load: Load) -> list[Figure]:
    """V2 with replay over V2 without, round by round; none where either is missing."""
    off, on = (
        [runner.served.get(load, []) for runner in runners if _is(runner, "V2", length)]
        for length in (None, BUFFER_LEN)
    )
    if not (off and on) or not len(off[0]) == len(on[0]) == ROUNDS:
        return []
    ratios = [b.token_seconds / a.token_seconds for a, b in zip(off[0], on[0], strict=True)]
    return [_figure(f"C{load.clients}, V2, time per output token, L {BUFFER_LEN} over off", ratios, "times")]


def _is(runner: Runner, name: str, buffer_len: int | None) -> bool:
    return (runner.serving.runner, runner.serving.buffer_len) == (name, buffer_len)


def _figure(name: str, values: Sequence[float], unit: str) -> Figure:
    return Figure(name, median(values), unit, low=min(values), high=max(values))


def _not_measured(runner: Runner) -> Note:
    if runner.failed:
        return Note(runner.name, f"failed: {runner.failed}", complaint=runner.failed)
    return Note(runner.name, f"not measured, refused: {runner.refused}")


def _conditions(load: Load, cuda: bool) -> str:
    model = f"{GPU_SHAPE.num_hidden_layers} layers with dummy weights" if cuda else "the tiny checkpoint, one thread"
    return (
        f"{load.prompt_len} tokens in, {load.output_len} out, {DTYPE} with float32 state"
        f"{'' if cuda else ' (stock GDN on a CPU takes no other)'}, float16 ring, {model}; "
        f"median of {ROUNDS} rounds in turn (smallest to largest)"
    )


def _on_cpu(largest: Load) -> list[Serving]:
    args = (("enforce_eager", True), ("max_num_batched_tokens", 512), ("num_gpu_blocks_override", 64))
    checkpoint = tiny_checkpoint(ENGINE)
    return [Serving(name, length, checkpoint, DTYPE, largest, args) for name, length in _SETTINGS]


def _on_cuda(folder: Path, largest: Load) -> list[Serving]:
    """Engines of a larger model without weights, each on its share of the GPU's memory."""
    config = model_config(QWEN3_5["qwen3.5-2b"], GPU_SHAPE) | {"dtype": DTYPE}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    args = (("load_format", "dummy"), ("gpu_memory_utilization", 0.8 / len(_SETTINGS)))
    return [Serving(name, length, folder, DTYPE, largest, args) for name, length in _SETTINGS]


def _length(buffer_len: int | None) -> str:
    return "off" if buffer_len is None else f"L {buffer_len}"
