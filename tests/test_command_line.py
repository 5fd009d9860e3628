"""The command line as a user meets it: exit statuses, one clear line for bad input, files of a run, resume.

Commands run in child processes in an empty directory; the engine level has tests of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from replay_parity.cases.corpus import corpus
from replay_parity.cases.scenarios import scenarios
from replay_parity.harness.run_dir import RunDir, RunDirError, read_records, read_settings

EXAMPLES = 6
PLANNED = len(corpus()) + len(scenarios()) + EXAMPLES
LAYERS = ("run", "--level", "kernel", "--level", "schedule", "--examples", str(EXAMPLES))


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "replay_parity", *words], cwd=folder, capture_output=True, text=True, timeout=300
    )


def without_vllm(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """vLLM is hidden by a finder that does not find it."""
    hide = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'vllm' else real(name, *a)\n"
        "from replay_parity.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", hide, *words], cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("passing")
    done = command(folder, *LAYERS)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verdict: pass" in done.stdout
    return folder / "parity-report"


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing")
    done = command(
        folder, "run", "--level", "schedule", "--fault", "cursor.prompt_base", "--examples", "0", "--out", "bad"
    )
    assert done.returncode == 1
    assert "verdict: fail" in done.stdout and "write_pos" in done.stdout
    return folder / "bad"


def test_a_passing_run_leaves_its_files(passing: Path) -> None:
    records = list(read_records(passing / "records.jsonl"))
    assert len(records) == 2 * PLANNED
    needed = {"id", "level", "target", "regime", "verdict", "symptom", "stage", "distances", "situations"}
    assert all(needed <= record.keys() for record in records)
    summary = json.loads((passing / "summary.json").read_text())
    assert summary["verdict"] == "pass"
    assert summary["counts"]["schedule"] == {"pass": PLANNED, "fail": 0, "unknown": 0}
    assert all(summary["proof"][name] > 0 for name in ("replay_steps", "flushes", "resumes", "one_token_tails"))
    assert "<html" in (passing / "report.html").read_text()
    assert not (passing / "failures").exists()


def test_the_same_seed_gives_the_same_bytes(passing: Path, tmp_path: Path) -> None:
    assert command(tmp_path, *LAYERS, "--workers", "1").returncode == 0
    again = tmp_path / "parity-report" / "records.jsonl"
    assert again.read_bytes() == (passing / "records.jsonl").read_bytes()


def test_failures_replay_with_and_without_the_fault(failing: Path) -> None:
    cases = sorted((failing / "failures").glob("*.json"))
    assert cases
    for case in cases[:3]:
        words = ("replay", str(case), "--level", "schedule")
        faulty = command(failing, *words, "--fault", "cursor.prompt_base")
        assert faulty.returncode == 1 and "step" in faulty.stdout
        assert command(failing, *words).returncode == 0


def test_the_record_gives_the_command_that_replays(failing: Path) -> None:
    record = next(r for r in read_records(failing / "records.jsonl") if r["verdict"] == "fail")
    program, *words = record["rerun"].split()
    assert program == "replay-parity"
    assert command(failing, *words).returncode == 1


WRONG: dict[str, tuple[str, str]] = {
    "truncated": ('{"schema": 1, "id": "x", "geo', "not whole JSON"),
    "unknown key": ("unknown", "replays: unknown key"),
    "negative": ("negative", "steps[0].rows[0][1]: must be from 1"),
    "decodes before prefill": ("early", "steps[0].rows[0]: request 0 decodes before its prefill is done"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line(tmp_path: Path, name: str) -> None:
    text, message = WRONG[name]
    data = scenarios()["plain-flush"].case.to_json()
    if text == "unknown":
        data["replays"] = {}
    elif text == "negative":
        data["steps"][0]["rows"] = [[0, -2]]
    elif text == "early":
        data["steps"][0]["rows"] = [[0, 7]]
    path = tmp_path / "case.json"
    path.write_text(text if text.startswith("{") else json.dumps(data))
    done = command(tmp_path, "replay", "case.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


BAD_USAGE = {
    "fault": (("run", "--fault", "nothing"), "fault: there is no 'nothing'"),
    "fault level": (("run", "--level", "kernel", "--fault", "cursor.prompt_base"), "has no form at level kernel"),
    "seed": (("run", "--seed", "-1"), "argument --seed: must be at least 0"),
    "level": (("run", "--level", "kernels"), "invalid choice: 'kernels'"),
    "scenario": (("cases", "show", "nothing"), "there is no scenario 'nothing'"),
    "resume": (("run", "--resume", "none"), "--resume none: summary.json cannot be read"),
    "report": (("report", "none"), "none"),
    "architecture": (
        ("run", "--architecture", "Qwen3"),
        "replay-parity: --architecture Qwen3: is not served; use one of Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, "
        "Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration\n",
    ),
    "architecture without a model": (
        ("run", "--level", "schedule", "--architecture", "Qwen3_5MoeForCausalLM"),
        "--architecture Qwen3_5MoeForCausalLM: only level engine loads a model; add --level engine",
    ),
}


@pytest.mark.parametrize("name", BAD_USAGE)
def test_bad_usage_is_refused(tmp_path: Path, name: str) -> None:
    words, message = BAD_USAGE[name]
    done = command(tmp_path, *words)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_foreign_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    done = command(tmp_path, "run", "--level", "kernel", "--out", ".")
    assert done.returncode == 2 and "name another directory" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_cases_list_and_show(tmp_path: Path) -> None:
    listed = command(tmp_path, "cases", "list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(scenarios())
    shown = command(tmp_path, "cases", "show", "plain-flush")
    (tmp_path / "case.json").write_text(shown.stdout)
    assert command(tmp_path, "replay", "case.json", "--level", "kernel").returncode == 0


def test_report_is_written_again(failing: Path) -> None:
    before = (failing / "report.html").read_text()
    (failing / "report.html").unlink()
    assert command(failing, "report", ".").returncode == 0
    assert (failing / "report.html").read_text() == before


def test_resume_goes_on_behind_a_cut_line(passing: Path, tmp_path: Path) -> None:
    """What a kill leaves: some whole records and half of one."""
    cut = tmp_path / "cut"
    cut.mkdir()
    whole = (passing / "records.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (cut / "records.jsonl").write_text("".join(lines[:7]) + lines[7][:40])
    (cut / "summary.json").write_text((passing / "summary.json").read_text())
    done = command(tmp_path, "run", "--resume", "cut")
    assert done.returncode == 0
    assert (cut / "records.jsonl").read_text() == whole


def test_resume_keeps_what_the_engine_was_asked_with(passing: Path, tmp_path: Path) -> None:
    """Also from a summary of an earlier version, which says nothing of either."""
    summary = json.loads((passing / "summary.json").read_text())
    assert (summary["engine_arg"], summary["architecture"]) == ([], "Qwen3_5ForCausalLM")
    asked = {"engine_arg": ["max_num_seqs=4"], "architecture": "Qwen3_5MoeForCausalLM"}
    for kept, wanted in ((asked, asked), ({}, {"engine_arg": [], "architecture": "Qwen3_5ForCausalLM"})):
        earlier = {name: value for name, value in summary.items() if name not in asked} | kept
        (tmp_path / "summary.json").write_text(json.dumps(earlier))
        settings = read_settings(tmp_path)
        assert {name: settings[name] for name in asked} == wanted and settings["seed"] == summary["seed"]


def test_a_resumed_architecture_is_planned_and_told(tmp_path: Path) -> None:
    """With vLLM hidden the engine level plans its cases and runs none."""
    words = ("run", "--level", "engine", "--examples", "0", "--out", "moe", "--architecture", "Qwen3_5MoeForCausalLM")
    for given in (words, ("run", "--resume", "moe")):
        done = without_vllm(tmp_path, *given)
        assert done.returncode == 3, done.stderr
        summary = json.loads((tmp_path / "moe" / "summary.json").read_text())
        assert summary["architecture"] == "Qwen3_5MoeForCausalLM"
        assert summary["command"].endswith("--architecture Qwen3_5MoeForCausalLM")
        reasons = {entry["reason"] for entry in summary["not_planned"] if entry["id"].startswith("trained-")}
        assert reasons == {"inputs.regime: there is a trained checkpoint of Qwen3_5ForCausalLM alone; use model_like"}


def test_engine_level_without_vllm_says_how_to_get_it(tmp_path: Path) -> None:
    """The other levels do not need it."""
    for level, status in (("schedule", 0), ("engine", 3)):
        done = without_vllm(tmp_path, "run", "--level", level, "--examples", "0", "--out", level)
        assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "pip install" in done.stderr


def test_a_record_cut_in_the_middle_of_the_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"id": "a"}\n{"id": \n')
    with pytest.raises(RunDirError, match="line 2 is no whole JSON object"):
        list(read_records(path))
    with pytest.raises(RunDirError, match="holds no records"):
        RunDir(tmp_path / "none", resume=True)


@pytest.mark.parametrize("named", [True, False], ids=["named", "the user's own"])
def test_a_database_is_kept_on_request(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAY_PARITY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "shared" if named else tmp_path / "cache" / "examples"
    words = ("faults-are-found", "--database", *([str(folder)] if named else []))
    done = command(
        tmp_path, "run", "--level", "schedule", "--fault", "kernel.head_map", "--examples", "9", "--out", *words
    )
    assert done.returncode == 1
    assert folder.is_dir() and any(folder.iterdir())


@pytest.mark.parametrize("pair", ["max_num_seqs", "=4", "two words=1"])
def test_an_engine_argument_needs_a_key_and_a_value(pair: str, tmp_path: Path) -> None:
    done = command(tmp_path, "run", "--level", "kernel", "--examples", "0", "--engine-arg", pair)
    assert done.returncode == 2
    assert (
        done.stderr.strip() == f"replay-parity: --engine-arg {pair}: must be KEY=VALUE, KEY a name of vLLM's EngineArgs"
    )
