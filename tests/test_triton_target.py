"""The kernel level on the Triton kernels' own source, interpreted: clean cases pass, each planted fault fails.

A fault is an edit of the Triton kernel; the case that was kept for its torch form must show it too. What the torch
formulation cannot show is checked here as well: the line of the kernel that read poison or wrote outside.
"""

from __future__ import annotations

import pytest
import torch
from replay_parity.cases.case import Case
from replay_parity.cases.corpus import corpus
from replay_parity.cases.scenarios import scenarios
from replay_parity.harness.decode_op import decode_op, why_not
from replay_parity.harness.explore import drawn_cases
from replay_parity.harness.fault_catalogue import FAULTS
from replay_parity.harness.faults import FaultError, forms, plant
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.kernel_path import KernelPath
from replay_parity.harness.paths import LevelUnavailable, open_path

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(why_not("triton") is not None, reason="triton is not installed"),
]

KEPT = {case.id: case for case in corpus()}
NAMED = ("two-flushes", "padded-step", "batch-order-flips", "production-dtypes", "padding-comes-and-goes")
TRITON_FORMS = [name for name, _ in forms("triton")]


def _shows(fault: str) -> list[Case]:
    kept = KEPT.get(f"corpus-kernel-{fault}")
    return ([kept] if kept else []) + [scenarios()[name].case for name in NAMED]


def test_every_fault_of_the_kernel_level_has_a_triton_form() -> None:
    assert set(TRITON_FORMS) == {name for name, fault in FAULTS.items() if "kernel" in fault.levels}


@pytest.mark.parametrize("name", NAMED)
def test_scenarios_pass(name: str) -> None:
    record = judge_case(KernelPath(target="triton"), scenarios()[name].case).record
    assert (record["verdict"], record["target"]) == ("pass", "triton"), record["reason"]
    assert record["counts"]["flushes"] > 0


def test_generated_cases_pass_on_both_backends() -> None:
    for case in drawn_cases("kernel", ("exact", "model_like", "adversarial"), 11, 12):
        for target in ("torch", "triton"):
            record = judge_case(KernelPath(target=target), case).record
            assert record["verdict"] == "pass", (target, record["reason"])


@pytest.mark.parametrize("fault", TRITON_FORMS)
def test_a_planted_fault_fails(fault: str) -> None:
    faulty = KernelPath(fault, "triton")
    caught = next((case for case in _shows(fault) if judge_case(faulty, case).record["verdict"] == "fail"), None)
    assert caught is not None
    assert judge_case(KernelPath(target="triton"), caught).record["verdict"] == "pass"


def test_a_read_of_poison_names_the_line_of_the_kernel() -> None:
    case = next(case for case in _shows("kernel.mask_le") if case.inputs.seed % 2 == 0)
    record = judge_case(KernelPath("kernel.mask_le", "triton"), case).record
    assert record["symptom"] == "poison"
    assert "replay_decode_kernel reads poison from ring_" in record["reason"]
    assert "(decode_triton.py:" in record["reason"]


def test_a_fault_without_a_triton_form_is_refused() -> None:
    with (
        pytest.raises(FaultError, match=r"slot\.no_zero has no form for target triton"),
        plant("slot.no_zero", "kernel", "triton"),
    ):
        pass


def test_a_gpu_target_says_what_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(LevelUnavailable, match="target triton_gpu: there is no CUDA device here"):
        open_path("kernel", None, "triton_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(scenarios()))
def test_scenarios_pass_on_a_gpu(name: str) -> None:
    record = judge_case(KernelPath(target="triton_gpu"), scenarios()[name].case).record
    assert record["verdict"] == "pass", record["reason"]


def test_the_interpreter_is_off_outside_the_block() -> None:
    from replay_parity.harness.interpreter import interpreted

    with decode_op("triton"):
        pass
    with interpreted():
        pass
