"""Compiled models without an engine: what is asked of vLLM, where it can compile, and compiled code in sight.

Inductor compiles a small function for real. Its kernels pass no dispatcher, so the recorder of graphs and the sentinel
of host reads are tested on them beside the same code uncompiled: a replay must see new inputs, a read of what a kernel
computed must be found. Where nothing of this machine can compile, the reason is a line that names what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.harness import compiled_plan, execution
from replay_parity.harness.campaign import is_done
from replay_parity.harness.compiled_kernels import make_visible, watching
from replay_parity.harness.compiled_plan import PLAYED_COMPILED, PlannedAs, compiled_cases
from replay_parity.harness.engine_trace import EngineConfig
from replay_parity.harness.execution import asked_mode, compiled_args, execution_args, may_compile, why_not_compiled
from replay_parity.harness.graph_recorder import Graph, Recorder, capture
from replay_parity.harness.paths import LevelUnavailable, open_path
from replay_parity.harness.plan import Planned, plan
from replay_parity.harness.sync import Sentinel, is_marked
from torch import Tensor

COMPILES = why_not_compiled()
needs_compiler = pytest.mark.skipif(COMPILES is not None, reason=str(COMPILES))
EAGER = {"enforce_eager": True}
GRAPHS = {"cudagraph_capture_sizes": [2, 4], "max_cudagraph_capture_size": 4}


def config(sizes: tuple[int, ...] | None = None, judged: bool = True, **extra: Any) -> EngineConfig:
    """An engine's config with more EngineArgs."""
    return EngineConfig(Path("none"), capture_sizes=sizes, judged=judged, extra=tuple(extra.items()))


# name -> (config, what it comes to, whether vLLM may compile)
ASKED: dict[str, tuple[EngineConfig, dict[str, Any], bool]] = {
    "nothing": (config(), EAGER, False),
    "graphs": (
        config((2, 4)),
        {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", **GRAPHS}},
        False,
    ),
    "compiled": (
        config(compilation_config={"mode": 3}),
        {"enforce_eager": False, "compilation_config": {"mode": 3, "cudagraph_mode": "NONE"}},
        True,
    ),
    "compiled and graphs": (
        config((2, 4), compilation_config={"mode": 3}),
        {"enforce_eager": False, "compilation_config": {"mode": 3, "cudagraph_mode": "FULL_DECODE_ONLY", **GRAPHS}},
        True,
    ),
    "graphs left out": (
        config((2, 4), compilation_config={"cudagraph_mode": "NONE"}),
        EAGER,
        False,
    ),
    "vLLM's own mode": (
        config(enforce_eager=False),
        {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}},
        True,
    ),
    "eager in so many words": (config((2, 4), enforce_eager=True), EAGER, False),
    "a baseline": (config(judged=False, compilation_config={"mode": 3}, enforce_eager=False), EAGER, False),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_the_case_and_the_user_ask_for_comes_together(name: str) -> None:
    asked, args, compiles = ASKED[name]
    assert execution_args(asked) == args
    assert may_compile(asked) is compiles


def test_the_mode_that_was_asked_for() -> None:
    assert asked_mode(config(compilation_config={"mode": 3})) == 3
    assert asked_mode(config(compilation_config={"mode": "VLLM_COMPILE"})) == "VLLM_COMPILE"
    for asked in (config(), config((4,)), config(enforce_eager=False), config(compilation_config={"mode": "NONE"})):
        assert asked_mode(asked) is None
    assert asked_mode(config(judged=False, compilation_config={"mode": 3})) is None


def test_a_compiled_target_leaves_the_users_settings() -> None:
    extra = (("compilation_config", {"backend": "eager"}), ("max_num_seqs", 4))
    assert dict(compiled_args(extra)) == {"max_num_seqs": 4, "compilation_config": {"mode": 3, "backend": "eager"}}
    assert dict(compiled_args((("compilation_config", {"mode": 2}),))) == {"compilation_config": {"mode": 2}}


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No CUDA, whatever the machine, and nothing in the environment that decides."""
    monkeypatch.setattr(execution, "has_cuda", lambda: False)
    for name in ("TORCH_COMPILE_DISABLE", "VLLM_USE_BREAKABLE_CUDAGRAPH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_cpu_compiles_where_a_compiler_and_headers_are(on_a_cpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "some-c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    on_a_cpu.setenv("CXX", str(compiler))
    (tmp_path / "Python.h").touch()
    on_a_cpu.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert why_not_compiled() is None
    (tmp_path / "Python.h").unlink()
    missing = why_not_compiled()
    assert missing is not None and missing.startswith("compiled: Python.h is missing")


def test_without_a_compiler_the_line_names_it(on_a_cpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_a_cpu.setenv("PATH", str(tmp_path))
    missing = why_not_compiled()
    assert missing is not None and "no C++ compiler g++" in missing and "\n" not in missing
    on_a_cpu.setenv("CXX", "no-such-c++")
    assert "no C++ compiler no-such-c++" in str(why_not_compiled())


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "VLLM_USE_BREAKABLE_CUDAGRAPH"])
def test_a_switch_in_the_environment_is_named(on_a_cpu: pytest.MonkeyPatch, name: str) -> None:
    on_a_cpu.setenv(name, "1")
    assert f"{name}=1" in str(why_not_compiled())


def test_with_cuda_vllm_compiles_without_a_compiler_of_ours(on_a_cpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_a_cpu.setattr(execution, "has_cuda", lambda: True)
    on_a_cpu.setenv("PATH", str(tmp_path))
    assert why_not_compiled() is None


@pytest.mark.engine
def test_the_original_check_is_planned_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_plan, "why_not_compiled", lambda: None)
    jobs, left_out = compiled_cases(["schedule", "engine"], None)
    assert [(job.case.id, job.level, job.target) for job in jobs] == [
        (name, "engine", "plugin-compiled") for name in PLAYED_COMPILED
    ]
    assert left_out == []
    eager = {job.case.id for job in plan(["engine"], "smoke", 0, 0)[0] if isinstance(job, Planned)}
    assert set(PLAYED_COMPILED) <= eager
    # the user's choice, or no engine level
    assert compiled_cases(["kernel"], None) == ([], [])
    assert compiled_cases(["engine"], "plugin") == ([], [])
    assert compiled_cases(["engine"], None, (("compilation_config", {"mode": 0}),)) == ([], [])
    assert len(compiled_cases(["engine"], None, (("max_num_seqs", 8),))[0]) == len(PLAYED_COMPILED)


@pytest.mark.engine
def test_where_vllm_cannot_compile_it_is_left_out_with_the_reason(on_a_cpu: pytest.MonkeyPatch) -> None:
    on_a_cpu.setenv("CXX", "no-such-c++")
    jobs, left_out = compiled_cases(["engine"], None)
    assert jobs == [] and [entry.id for entry in left_out] == list(PLAYED_COMPILED)
    assert all("no-such-c++" in entry.reason for entry in left_out)
    with pytest.raises(LevelUnavailable, match=r"no C\+\+ compiler no-such-c\+\+.*target plugin runs eagerly"):
        open_path("engine", None, "plugin-compiled")


def test_one_case_on_two_targets_is_two_jobs() -> None:
    case = engine_scenarios()[PLAYED_COMPILED[0]].case
    eager, compiled = Planned(case, "engine"), PlannedAs(case, "engine", "plugin-compiled")
    records = [{"id": case.id, "level": "engine", "target": "plugin"}]
    assert is_done(eager, records) and not is_done(compiled, records)
    assert is_done(compiled, [*records, {"id": case.id, "level": "engine", "target": "plugin-compiled"}])


def forward(x: Tensor, w: Tensor) -> Tensor:
    """x [4, 8], w [4, 6]: a kernel, a library's product that takes a view of what it wrote, a kernel behind it."""
    y = torch.sin(x) * 2 + 1
    return torch.cos(torch.mm(y.view(8, 4), w)) + 3


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """`forward` by Inductor, with no guards that a watch could break: vLLM drops them too."""
    from torch._inductor import compile as inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    make_visible()
    inputs = (torch.zeros(4, 8), torch.zeros(4, 6))
    # the rest is for speed: no header to build first, no look at what the processor has
    settings = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.simdlen": 1}
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(settings):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield inductor(make_fx(forward)(*inputs), list(inputs))


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    """Drawn x and w."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 6, generator=generator)


class Seen:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.kernels, self.views = 0, 0

    def launched(self, kernel: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.kernels += 1

    def viewed(self, base: Tensor, view: Tensor) -> None:
        self.views += 1


@needs_compiler
def test_kernels_and_views_are_told_of_while_somebody_watches(compiled: Callable[[Tensor, Tensor], Tensor]) -> None:
    seen = Seen()
    with watching(seen):
        out = compiled(*inputs(0))
    assert torch.allclose(out, forward(*inputs(0)), atol=1e-6)
    assert (seen.kernels, seen.views) == (2, 1)
    compiled(*inputs(0))
    assert (seen.kernels, seen.views) == (2, 1)


@needs_compiler
def test_a_recorded_graph_runs_compiled_kernels_again(compiled: Callable[[Tensor, Tensor], Tensor]) -> None:
    (x, w), graph = inputs(1), Graph()
    with torch.inference_mode(), capture(graph):
        out = compiled(x, w)
    address = out.data_ptr()
    x.copy_(inputs(2)[0])
    graph.replay()
    assert out.data_ptr() == address
    assert out.numpy().tobytes() == compiled(x, w).numpy().tobytes()


@needs_compiler
def test_without_the_kernels_a_replay_would_be_wrong(compiled: Callable[[Tensor, Tensor], Tensor]) -> None:
    (x, w), graph = inputs(1), Graph()
    with torch.inference_mode(), Recorder(graph):
        out = compiled(x, w)
    x.copy_(inputs(2)[0])
    graph.replay()
    assert not torch.allclose(out, compiled(x, w), atol=0.1)


@needs_compiler
def test_what_compiled_code_makes_of_a_device_tensor_is_on_the_device(
    compiled: Callable[[Tensor, Tensor], Tensor],
) -> None:
    (x, w), sentinel = inputs(3), Sentinel()
    sentinel.mark(x)
    with sentinel.watch():
        out = compiled(x, w)
        plain = compiled(*inputs(3))
        # the mark has gone through kernel, view, product and kernel; w alone would mark none of them
        marks = is_marked(out), is_marked(plain), is_marked(w)
        out.tolist()
        plain.tolist()
    assert marks == (True, False, False)
    (read,) = sentinel.take()
    assert read.what == "Tensor.tolist" and "test_compiled" in read.place
