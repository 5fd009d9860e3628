"""The plugin's real metadata builder, fed the steps of generated timelines, agrees with the ledger row by row.

vLLM is imported but no engine runs. The comparison must reject: with a cursor fault planted it has to find a row. The
builder is watched for host reads of device values too: each planted one must fail a case whose values are all right.
"""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from replay_parity.cases.case import Case
from replay_parity.cases.scenarios import scenarios
from replay_parity.cases.strategies import cases
from replay_parity.cases.timeline import play
from replay_parity.harness.builder_path import BuilderPath, builder_findings
from replay_parity.harness.engine_sync import allowed_regions, vllm_sentinel
from replay_parity.harness.faults import plant
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.outcome import FAIL, PASS
from replay_parity.harness.paths import open_path
from replay_parity.harness.real_builder import RealBuilder

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", scenarios())
def test_scenarios_agree(name: str) -> None:
    case = scenarios()[name].case
    assert builder_findings(case, play(case)) == []


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(cases("schedule", ("exact",)))
def test_generated_timelines_agree(case: Case) -> None:
    assert builder_findings(case, play(case)) == []


@pytest.mark.parametrize(
    "fault", ["cursor.leftover_append", "cursor.flush_early", "cursor.modulo", "cursor.base_plus_one"]
)
def test_a_planted_cursor_fault_is_seen(fault: str) -> None:
    with plant(fault, "engine"):
        found = [finding for s in scenarios().values() for finding in builder_findings(s.case, play(s.case))]
    assert found and "right is" in found[0].message


@pytest.mark.parametrize("fault", ["sync.item", "sync.cpu", "sync.nonzero", "sync.bool"])
def test_a_planted_host_read_is_seen(fault: str) -> None:
    # a fault that the level's first target does not run brings its own
    record = judge_case(open_path("schedule", fault), scenarios()["one-token-tail"].case).record
    assert (record["target"], record["verdict"], record["symptom"]) == ("builder", FAIL, "host_sync")
    assert re.match(r"step 0: kernels/vllm_metadata\.py:\d+: .* waits for the device", record["reason"])
    # no value is wrong
    assert "wrong value" not in record["reason"] and "wrong cursor" not in record["reason"]


def test_regions_in_which_vllm_allows_a_read_are_honoured() -> None:
    RealBuilder(scenarios()["one-token-tail"].case)
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    sentinel, device = vllm_sentinel(), torch.arange(3)
    sentinel.mark(device)
    with allowed_regions(), sentinel.watch():
        with gpu_sync_allowed():
            device.tolist()
        assert sentinel.take() == []
        device.tolist()
    assert len(sentinel.take()) == 1


def test_an_upload_of_vllm_is_a_copy_on_the_device() -> None:
    RealBuilder(scenarios()["one-token-tail"].case)
    from vllm.utils.torch_utils import async_tensor_h2d

    sentinel, host = vllm_sentinel(), torch.arange(3)
    with sentinel.watch():
        async_tensor_h2d(host, device=torch.device("cpu")).tolist()
        host.tolist()
    assert [read.what for read in sentinel.take()] == ["Tensor.tolist"]


def test_the_builder_drives_a_whole_case() -> None:
    record = judge_case(BuilderPath(), scenarios()["resume-into-another-slot"].case).record
    assert (record["verdict"], record["target"]) == (PASS, "builder")
