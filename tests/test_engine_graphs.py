"""How this tests, in plain words: the same Cases in two real engines, one with FULL CUDA graphs and one without.

vLLM's own manager captures, pads and replays; on a CPU the graphs are emulated. The run with graphs must be the eager
run to the last bit, padded steps included, and it must have used the graphs that the Case says. Then faults are
planted in what a graph reads and in what the model runner hands over: each must fail a named scenario that passes
without it, and the verdict names the field that the graph read an old value of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from replay_parity.cases.case import Cache, Case, Graphs, Inputs, Replay, Request, Step
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.cases.geometry import ENGINE
from replay_parity.cases.inputs import token_ids
from replay_parity.cases.situations import situations
from replay_parity.harness.checkpoint import VOCAB_SIZE
from replay_parity.harness.contract import Legs
from replay_parity.harness.cpu_platform import has_cuda
from replay_parity.harness.engine_path import EnginePath
from replay_parity.harness.engine_process import EngineProcess
from replay_parity.harness.engine_trace import EngineConfig, EngineTrace
from replay_parity.harness.fault_catalogue import FAULTS
from replay_parity.harness.fault_run import CAUGHT, hunt
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.record import Record
from replay_parity.harness.verdict import judge

pytestmark = pytest.mark.engine

SIZES = (1, 2, 4)
SCENARIOS = {name: scenario.case for name, scenario in engine_scenarios().items()}
WITH_GRAPHS = tuple(
    name for name, case in SCENARIOS.items() if case.graphs is not None and case.inputs.regime == "model_like"
)
# eager ones of ring length 4 that are worth a graph: they run in the one that is open
GIVEN_GRAPHS = ("abort-mid-ring", "batch-order-flips")
# which scenario shows a fault, and what the verdict begins with
SHOWN_BY = {
    "graph.no_stage": ("padded-step", "step 1: non_spec_state_indices_tensor of model.layers.0.linear_attn"),
    "graph.stage_on_count": (
        "same-count-other-slots",
        "step 5: non_spec_state_indices_tensor of model.layers.0.linear_attn: the graph of 2 rows reads ",
    ),
    "graph.new_cursor_tensor": ("padded-step", "step 1: write_pos of model.layers.0.linear_attn: the graph of 4 rows"),
    "graph.stale_flag": (
        "padded-step",
        "step 4: is_flush of model.layers.0.linear_attn: the graph of 4 rows reads [0, 0, 0, 0], the step's are "
        "[1, 1, 1, 0]",
    ),
    "graph.padded_table": (
        "padding-comes-and-goes",
        "step 7: non_spec_state_indices_tensor of model.layers.0.linear_attn: the graph of 4 rows reads ",
    ),
}


def _tokens(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    rows = list(zip(token_ids(case, VOCAB_SIZE), case.requests, strict=True))
    return [row[: one.prompt_len] for row, one in rows], [row[one.prompt_len :] for row, one in rows]


def _played(engine: EngineProcess, case: Case) -> EngineTrace:
    played = engine.play(case, *_tokens(case))
    assert isinstance(played, EngineTrace), played
    return played


@pytest.fixture(scope="module")
def clean() -> Iterator[EnginePath]:
    """A path without a fault; its subject has graphs of the SIZES."""
    path = EnginePath()
    yield path
    path.close()


@pytest.fixture(scope="module")
def ran(clean: EnginePath) -> dict[str, Legs]:
    """What scenarios left in the clean path, each run once, in graphs of the SIZES."""

    class Ran(dict[str, Legs]):
        def __missing__(self, name: str) -> Legs:
            self[name] = clean.run(replace(SCENARIOS[name], graphs=Graphs(SIZES)))
            return self[name]

    return Ran()


@pytest.fixture(scope="module")
def config(clean: EnginePath, ran: dict[str, Legs]) -> EngineConfig:
    """What the clean path's subject was opened with."""
    assert ran["padded-step"].failure is None
    assert clean.subjects.latest.config.capture_sizes == SIZES
    return clean.subjects.latest.config


@pytest.fixture(scope="module")
def eager(config: EngineConfig) -> Iterator[EngineProcess]:
    """The same engine without graphs."""
    with EngineProcess(replace(config, capture_sizes=None)) as engine:
        yield engine


def test_all_scenarios_with_graphs_share_an_engine() -> None:
    assert len(WITH_GRAPHS) >= 4
    assert {SCENARIOS[name].graphs for name in WITH_GRAPHS} == {Graphs(SIZES)}
    assert {SCENARIOS[name].replay.buffer_len for name in (*WITH_GRAPHS, *GIVEN_GRAPHS)} == {4}


@pytest.mark.parametrize("name", [*WITH_GRAPHS, *GIVEN_GRAPHS])
def test_a_pass_and_no_bit_beside_the_eager_run(ran: dict[str, Legs], eager: EngineProcess, name: str) -> None:
    legs = ran[name]
    verdict = judge(legs)
    assert verdict.outcome == "pass", verdict.reason
    plain, subject = _played(eager, replace(legs.case, graphs=None)), legs.subject
    assert subject is not None and subject.cursors is not None
    # both by step; within one the engine samples in the order of its rows
    assert len(subject.outputs) == len(plain) > 10
    # a GPU's matrix product may be another one with a padded row
    assert has_cuda() or subject.outputs.numpy().tobytes() == plain.log_probs.tobytes()
    assert subject.rows.request.tolist() == plain.request.tolist()
    decoded = plain.rows.ran_as_decode == 1
    assert subject.cursors.write_pos.tolist() == plain.rows.write_pos[decoded].tolist()
    assert subject.cursors.is_flush.tolist() == (plain.rows.is_flush[decoded] == 1).tolist()
    # a graph runs no Python: its rows are counted by what the builder said
    assert plain.counts == {
        "replay_rows": subject.counts["replay_steps"],
        "flush_rows": subject.counts["flushes"],
    }
    assert subject.counts["replay_steps"] > subject.counts["flushes"] > 0
    assert not subject.events and not plain.rows.graph_rows.any()


def test_padding_is_recorded(clean: EnginePath, ran: dict[str, Legs]) -> None:
    legs = ran["padding-comes-and-goes"]
    rows = _played(clean.subjects.latest, legs.case).rows
    steps = [legs.timeline.steps[step] for step in rows.step.tolist()]
    assert rows.graph_rows.tolist() == [step.padded_to or 0 for step in steps]
    assert rows.padded_to.tolist() == [step.padded_to or len(step.rows) for step in steps]
    assert {(len(step.rows), step.padded_to) for step in steps} == {(3, None), (3, 4), (4, None), (4, 4)}


def test_aligned_blocks_in_graphs() -> None:
    """A decode ends a block and enters the next in a graph; a prefix hit leaves one token, which flushes in a graph."""
    one, both = Step(((0, 1),)), Step(((0, 1), (1, 1)))
    steps = (Step(((0, 32),)), Step(((0, 30),)), one, one, one, both, both, both, both, one)
    requests = (Request(62, 9), Request(33, 4, 0, 32))
    case = Case("align", ENGINE, Replay(4), Cache("align", 32), Graphs(SIZES), Inputs(), requests, steps)
    path = EnginePath()
    try:
        legs = path.run(case)
    finally:
        path.close()
    assert judge(legs).outcome == "pass", judge(legs).reason
    assert [step.padded_to for step in legs.timeline.steps] == [None, None, 1, 1, 1, 2, 2, 2, 2, 1]
    shown = situations(case, legs.timeline)
    assert shown["decode_block_crossing"] and shown["prefix_hit"] and shown["one_token_tail"]


class _Recorded:
    """An engine that hands over a trace played before."""

    execution = None

    def __init__(self, config: EngineConfig, trace: EngineTrace) -> None:
        self.config, self.trace = config, trace

    def play(self, *_: object) -> EngineTrace:
        return self.trace

    def close(self) -> None:
        pass


def test_an_eager_run_of_a_case_with_graphs_is_no_pass(config: EngineConfig, eager: EngineProcess) -> None:
    case = SCENARIOS["padded-step"]
    trace = _played(eager, replace(case, graphs=None))
    path = EnginePath()
    path.subjects.engines = [_Recorded(config, trace)]  # type: ignore[list-item]
    baseline = replace(eager.config, buffer_len=1, judged=False)
    path.baselines.engines = [_Recorded(baseline, trace)]  # type: ignore[list-item]
    record = judge_case(path, case).record
    assert (record["verdict"], record["symptom"]) == ("unknown", "not_played")
    assert record["reason"] == "step 1: the engine ran it eagerly, the Case in the graph of 4 rows"


def _faulty(clean: EnginePath, fault: str, name: str) -> Record:
    """The record of a scenario with a fault planted, beside the clean path's baseline."""
    path = EnginePath(fault)
    path.baselines = clean.baselines
    try:
        return judge_case(path, SCENARIOS[name]).record
    finally:
        path.subjects.close()


def test_every_fault_of_graphs_is_shown_here() -> None:
    of_graphs = {name for name in FAULTS if name.startswith("graph.")}
    assert of_graphs == {*SHOWN_BY, "graph.capture_advances"}


@pytest.mark.parametrize("fault", SHOWN_BY)
def test_an_old_value_in_a_graph_fails_by_its_name(clean: EnginePath, ran: dict[str, Legs], fault: str) -> None:
    name, words = SHOWN_BY[fault]
    assert judge(ran[name]).outcome == "pass"
    record = _faulty(clean, fault, name)
    assert (record["verdict"], record["symptom"], record["fault"]) == ("fail", "stale_graph", fault), record["reason"]
    assert record["reason"].startswith(words), record["reason"]
    # not the audit alone: the numbers are wrong too
    assert "first wrong value: step " in record["reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("fault", SHOWN_BY)
def test_the_audit_names_the_field_of_a_real_graph(clean: EnginePath, ran: dict[str, Legs], fault: str) -> None:
    """The same audit on CUDA's own graphs; what a replay does with an old value is the device's business."""
    name, words = SHOWN_BY[fault]
    assert judge(ran[name]).outcome == "pass"
    record = _faulty(clean, fault, name)
    assert (record["verdict"], record["symptom"]) == ("fail", "stale_graph")
    assert record["reason"].startswith(words)


def test_a_capture_on_real_blocks_fails(clean: EnginePath, ran: dict[str, Legs]) -> None:
    assert judge(ran["padded-step"]).outcome == "pass"
    record = _faulty(clean, "graph.capture_advances", "padded-step")
    assert (record["verdict"], record["symptom"]) == ("fail", "out_of_bounds"), record["reason"]
    assert "while graphs were captured: " in record["reason"] and "block 1: " in record["reason"]


def test_a_base_in_request_order_fails(clean: EnginePath, ran: dict[str, Legs]) -> None:
    assert judge(ran["batch-order-flips"]).outcome == "pass"
    record = _faulty(clean, "adapter.request_order", "batch-order-flips")
    assert record["verdict"] == "fail"
    assert "first wrong cursor: step 1 row 0: request 0 token 3: " in record["reason"]


def test_no_base_is_refused_in_clear_words() -> None:
    refusal = FAULTS["adapter.none"].refusal
    assert refusal is not None
    found = hunt("adapter.none", "engine", 1, 0)
    assert (found.outcome, found.examples, found.symptom) == (CAUGHT, 1, "exception")
    assert found.reason is not None and found.reason.startswith(f"ReplayMetadataError: {refusal}")
