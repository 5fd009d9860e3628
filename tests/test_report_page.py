"""How this tests the page: a run is written to disk as the harness would, with one real resume-phase schedule in it,
the page is made from it, and the HTML is parsed again: what it says is compared with what was put in.

The last tests open the page in a browser, if the machine has one, and read what the scripts drew.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from replay_parity.reports import page as page_module
from replay_parity.reports.page import ReportError, write_report

HOSTILE = "</script><img src=x onerror=alert(1)>"
L = 4

# ---- a run to show: three requests in a ring of 4, request 0 is preempted and comes back with 11 tokens -------------

REQUESTS = [{"prompt_len": 6, "output_len": 12}, {"prompt_len": 9, "output_len": 12},
            {"prompt_len": 5, "output_len": 20}, {"prompt_len": 3, "output_len": 9}]  # fmt: skip
STEPS: list[dict[str, Any]] = [
    {"rows": [[0, 6], [1, 8]]},
    {"rows": [[0, 1], [1, 1]]},
    {"rows": [[0, 1], [1, 1], [2, 5]]},
    {"rows": [[0, 1], [1, 1], [2, 1]]},
    {"rows": [[0, 1], [1, 1], [2, 1]]},
    {"preempt": [0], "rows": [[1, 1], [2, 1], [3, 3]]},
    *({"rows": [[1, 1], [2, 1], [3, 1]]} for _ in range(4)),
    {"rows": [[1, 1], [2, 1], [3, 1], [0, 8]]},
    {"rows": [[1, 1], [2, 1], [3, 1], [0, 3]]},
    {"rows": [[1, 1], [2, 1], [0, 1], [3, 1]]},
    {"rows": [[2, 1], [0, 1], [3, 1]]},
    {"rows": [[0, 1]], "abort": [2]},
    *({"rows": [[0, 1]]} for _ in range(3)),
]


class Player:
    """Plays STEPS by the rules of the semantics; ``got`` is what a base that stays at the prompt would say."""

    def __init__(self) -> None:
        self.computed: dict[int, int] = {}
        self.prefill_len = {number: request["prompt_len"] for number, request in enumerate(REQUESTS)}
        self.slots: dict[int, int] = {}

    def timeline(self) -> dict[str, Any]:
        return {"buffer_len": L, "steps": [self.step(step) for step in STEPS]}

    def step(self, step: dict[str, Any]) -> dict[str, Any]:
        for request in step.get("preempt", ()):
            self.prefill_len[request] = self.computed.pop(request) + 1
            self.slots.pop(request)
        for request in step.get("abort", ()):
            self.computed.pop(request)
            self.slots.pop(request)
        rows = [self.row(request, num_tokens) for request, num_tokens in step["rows"]]
        finished = [n for n, c in self.computed.items() if c == sum(REQUESTS[n].values()) - 1]
        for request in finished:
            self.computed.pop(request)
            self.slots.pop(request)
        decodes = all(row["write_pos"] is not None for row in rows)
        padded = 4 if decodes and len(rows) == 3 else 2 if decodes and len(rows) == 1 else None
        events = {key: step.get(key, []) for key in ("preempt", "abort")}
        return {"rows": rows, **events, "finished": finished, "padded_to": padded}

    def row(self, request: int, num_tokens: int) -> dict[str, Any]:
        computed = self.computed.get(request, 0)
        if request not in self.slots:
            self.slots[request] = min(set(range(9)) - set(self.slots.values()))
        self.computed[request] = computed + num_tokens
        row = {"request": request, "num_tokens": num_tokens, "num_computed": computed, "slot": self.slots[request]}
        steps, faulty = computed - self.prefill_len[request], computed - REQUESTS[request]["prompt_len"]
        if computed and num_tokens == 1 and steps < 0:
            return {**row, "kind": "leftover", **cursors(0, True, 0, True)}
        if steps < 0:
            kind = "prefill" if computed else "first_chunk"
            return {**row, "kind": kind, **cursors(None, None, None, None)}
        return {**row, "kind": "decode", **cursors(steps % L, steps % L == L - 1, faulty % L, faulty % L == L - 1)}


def cursors(*values: int | bool | None) -> dict[str, int | bool | None]:
    return dict(zip(("write_pos", "is_flush", "got_write_pos", "got_is_flush"), values, strict=True))


def resume_case(level: str = "schedule") -> dict[str, Any]:
    case = {
        "schema": 1,
        "id": "resume-phase",
        "geometry": {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 16, "conv_width": 4},
        "replay": {"buffer_len": L, "ring_dtype": "float32", "state_dtype": "float32", "activation_dtype": "float32"},
        "cache": {"mode": "none", "block_size": 0},
        "graphs": {"capture_sizes": [1, 2, 4]},
        "inputs": {"regime": "model_like", "seed": 7},
        "requests": REQUESTS,
        "steps": STEPS,
    }
    timeline = Player().timeline()
    bad = next(
        (number, place, row)
        for number, step in enumerate(timeline["steps"])
        for place, row in enumerate(step["rows"])
        if row["got_write_pos"] != row["write_pos"]
    )
    step, place, row = bad
    reason = (
        f"step {step} row {place}: request {row['request']} token {row['num_computed']}: head 2 off by 0.31 "
        f"(limit 3.1e-6); resume took write_pos {row['got_write_pos']} where {row['write_pos']} is right"
    )
    first_bad = {"step": step, "row": place, "head": 2, "request": row["request"], "position": row["num_computed"]}
    return {
        **{"id": "resume-phase", "level": level, "target": "torch" if level == "schedule" else "plugin"},
        **{"regime": "model_like", "fault": "cursor.prompt_base", "verdict": "fail", "symptom": "mismatch"},
        **{"stage": "decode", "reason": reason, "first_bad": first_bad},
        "distances": {"output run rms": 4.1e-2, "output run max": 0.31, "state at flush": 0.0, "poison bytes": 0.0},
        "limits": {"output run rms": 4.4e-7, "output run max": 3.1e-6, "state at flush": 2.0e-6, "poison bytes": 0.0},
        "situations": ["resume", "recycled slot", "flush boundary", "one-token tail", "padded step", "abort"],
        "counts": {"replay_steps": 35, "flushes": 8, "resumes": 1, "one_token_tails": 1},
        "guards": "A request that comes back counts its ring from the tokens it was re-admitted with, not its prompt.",
        "rerun": f"replay-parity replay failures/resume-phase.json --level {level} --fault cursor.prompt_base",
        "case": case,
        "timeline": timeline,
    }


def passing(number: int, draw: random.Random) -> dict[str, Any]:
    level = ("kernel", "kernel", "kernel", "schedule", "schedule", "engine")[number % 6]
    regime = ("exact", "model_like", "adversarial")[number % 3]
    limit = 0.0 if regime == "exact" else 3.1e-6
    return {
        **{"id": f"{level}-{number:05d}", "level": level, "target": "plugin" if level == "engine" else "torch"},
        **{"regime": regime, "fault": None, "verdict": "pass", "symptom": None, "stage": None, "reason": None},
        **{"first_bad": None, "guards": None, "case": None, "timeline": None},
        "distances": {"output run max": limit * draw.uniform(0.01, 0.4)},
        "limits": {"output run max": limit},
        "situations": [name for name, odds in SITUATIONS.items() if draw.random() < odds],
        "counts": {"replay_steps": 30, "flushes": 7, "resumes": number % 2, "one_token_tails": int(number % 5 == 0)},
        "rerun": f"replay-parity run --level {level} --seed {number} --examples 1",
    }


SITUATIONS = {"flush boundary": 0.8, "recycled slot": 0.4, "resume": 0.5, "one-token tail": 0.2, "padded step": 0.6,
              "abort": 0.1, "prefix hit": 0.05, "ring of one": 0.08, "align boundary": 0.0}  # fmt: skip
VERSIONS = {"replay-parity": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "triton": "3.9.0", "vllm": "0.32.0",
            "transformers": "5.2.0"}  # fmt: skip


def sample_run(folder: Path, passes: int = 60) -> Path:
    """A run as the harness leaves it; counts are those of its own records."""
    draw = random.Random(0)
    records = [passing(number, draw) for number in range(passes)]
    records.insert(passes // 2, resume_case("schedule"))
    records.append(resume_case("engine"))
    late = {**passing(5, draw), "id": "long-run", "verdict": "unknown", "symptom": "timeout"}
    late |= {"distances": {}, "limits": {}, "reason": "the engine did not answer within 120 s; nothing was compared"}
    records.append(late)
    situations = {name: sum(name in record["situations"] for record in records) for name in SITUATIONS}
    pairs = {a: {b: sum({a, b} <= set(r["situations"]) for r in records) for b in SITUATIONS} for a in SITUATIONS}
    summary = {
        **{"verdict": "fail", "situations": situations, "situation_pairs": pairs, "versions": VERSIONS, "seed": 7},
        **{"git": {"revision": "8c1f0e5d2b7a4936", "dirty": True}, "device": "cpu", "profile": "ci"},
        "fault": "cursor.prompt_base",
        "command": "replay-parity run --profile ci --seed 7 --fault cursor.prompt_base --out parity-report",
        "not_planned": [{"id": f"triton-{n}", "level": "kernel", "reason": "no GPU on this machine"} for n in range(3)],
    }
    return write_run(folder, records, summary)


def write_run(folder: Path, records: list[dict[str, Any]], summary: dict[str, Any] | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


# ---- reading a page ------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page holds: tags with attributes, the text outside scripts, the data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside: str | None = None
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else None
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside is None and data.strip():
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found

    def banner(self) -> str:
        (found,) = (attrs["class"] for tag, attrs in self.tags if tag == "header")
        return str(found).removeprefix("banner ")

    def cases(self) -> list[str]:
        kinds = [str(attrs.get("class")) for tag, attrs in self.tags if tag == "details"]
        return [kind.removeprefix("case ") for kind in kinds if kind.startswith("case ")]


def page_of(tmp_path: Path, records: list[dict[str, Any]], summary: dict[str, Any] | None) -> Page:
    return Page(write_report(write_run(tmp_path / "run", records, summary)))


# ---- structure -----------------------------------------------------------------------------------------------------


def test_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    path = write_report(sample_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "report.html"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["records.jsonl", "report.html", "summary.json"]
    for tag, attrs in Page(path).tags:
        assert tag not in ("img", "iframe", "object") and not (tag == "script" and "src" in attrs)
        for key in ("src", "href"):
            assert (attrs.get(key) or "#").startswith(("#", "data:")), (tag, attrs)
    text = path.read_text()
    assert "url(" not in text and "@import" not in text and "https://" not in text


def test_verdict_counts_and_failures_stand_without_scripts(tmp_path: Path) -> None:
    page = Page(write_report(sample_run(tmp_path / "run")))
    assert page.banner() == "fail"
    assert "2 of 63 cases failed" in page.text
    assert page.cases() == ["fail", "fail", "unknown"]
    assert "resume took write_pos 1 where 0 is right" in page.text
    assert "step 12, row 2, head 2, request 0, token 11" in page.text
    assert "cursor.prompt_base" in page.text and "with local changes" in page.text
    assert "no GPU on this machine" in page.text


def test_the_data_holds_failed_first_and_folds_passes(tmp_path: Path) -> None:
    records = Page(write_report(sample_run(tmp_path / "run"))).data["records"]
    assert [record["verdict"] for record in records[:4]] == ["fail", "fail", "unknown", "pass"]
    assert records[0]["timeline"]["buffer_len"] == L and records[0]["case"]["schema"] == 1
    assert not any("case" in record for record in records if record["verdict"] == "pass")


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    record = {**resume_case(), "id": HOSTILE, "reason": HOSTILE, "situations": [HOSTILE], "rerun": HOSTILE}
    summary = {"verdict": "fail", "device": HOSTILE, "command": HOSTILE, "situations": {HOSTILE: 1}}
    page = page_of(tmp_path, [record], summary)
    assert not any(tag == "img" or any(key.startswith("on") for key in attrs) for tag, attrs in page.tags)
    assert len(page.scripts) == 2
    assert page.data["records"][0]["id"] == HOSTILE
    assert HOSTILE in page.text


@pytest.mark.parametrize("summary", [None, {"verdict": "pass"}])
def test_an_empty_run_is_unknown_never_pass(tmp_path: Path, summary: dict[str, Any] | None) -> None:
    page = page_of(tmp_path, [], summary)
    assert page.banner() == "unknown"
    assert "nothing was compared" in page.text


def test_passing_records_alone_are_not_a_pass(tmp_path: Path) -> None:
    records = [passing(1, random.Random(1))]
    assert page_of(tmp_path / "a", records, {"verdict": "pass"}).banner() == "pass"
    assert page_of(tmp_path / "b", records, None).banner() == "unknown"
    assert page_of(tmp_path / "c", records, {"verdict": "pass", "proof": {"replay_steps": 0}}).banner() == "unknown"
    assert page_of(tmp_path / "d", records, {"verdict": "fail"}).banner() == "fail"
    lost = {"verdict": "pass", "counts": {"kernel": {"pass": 2, "fail": 0, "unknown": 0}}}
    assert page_of(tmp_path / "f", records, lost).banner() == "unknown"
    assert page_of(tmp_path / "g", [*records, *records], lost).banner() == "pass"
    assert page_of(tmp_path / "e", [*records, resume_case()], {"verdict": "pass"}).banner() == "fail"


def test_counters_that_stayed_zero_are_pointed_out(tmp_path: Path) -> None:
    record = {**passing(1, random.Random(1)), "counts": {"replay_steps": 9, "flushes": 2, "resumes": 0}}
    page = page_of(tmp_path, [record], {"verdict": "pass", "situations": {"resume": 0}})
    assert "never happened in this run" in page.text and "not recorded" in page.text
    assert sum(tag == "li" and attrs.get("class") == "never" for tag, attrs in page.tags) == 3


READS = ["vllm/v1/attention/backends/gdn_attn.py:302: Tensor.item waits for the device",
         "vllm/v1/worker/gpu/x.py:7: <b>torch.nonzero</b> waits for the device"]  # fmt: skip


def test_reads_by_vllm_itself_stand_there_once_and_blame_nobody(tmp_path: Path) -> None:
    """Two records name the same place, the summary names it too and one more."""
    draw = random.Random(0)
    records = [{**passing(number, draw), "stock_reads": READS[:1]} for number in range(2)]
    summary = {"verdict": "pass", "stock_reads": READS}
    page = page_of(tmp_path, records, summary)
    assert page.banner() == "pass" and page.cases() == []
    before, _, section = page.text.partition("Host reads by vLLM's own code")
    assert [section.count(read) for read in READS] == [1, 1]
    assert not any(read in before for read in READS)
    assert "not the subject's and count in no verdict" in section
    alone = page_of(tmp_path / "alone", records, None)
    assert READS[0] in alone.text, "records are enough"


def test_without_reads_by_vllm_nothing_is_said_of_them(tmp_path: Path) -> None:
    assert "own code" not in page_of(tmp_path, [passing(0, random.Random(0))], {"verdict": "pass"}).text


def test_least_records_are_enough(tmp_path: Path) -> None:
    page = page_of(tmp_path, [{"id": "a", "level": "kernel", "verdict": "fail"}], {"verdict": "fail"})
    assert page.cases() == ["fail"]


def test_numbers_that_are_none_survive(tmp_path: Path) -> None:
    record = {**resume_case(), "distances": {"a": float("nan"), "b": None}, "limits": {"a": 1.0, "b": None}}
    page = page_of(tmp_path, [record], {"verdict": "fail"})
    assert page.data["records"][0]["distances"] == {"a": "NaN", "b": "Infinity"}
    assert page.data["records"][0]["worst"] == ["a", "NaN", 1.0, "Infinity"]


def test_same_records_same_bytes(tmp_path: Path) -> None:
    run = sample_run(tmp_path / "run")
    assert write_report(run).read_bytes() == write_report(run, tmp_path / "other.html").read_bytes()


def test_many_failures_are_capped_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "DETAILED_CASES", 5)
    monkeypatch.setattr(page_module, "LISTED_CASES", 3)
    page = page_of(tmp_path, [resume_case() for _ in range(7)], {"verdict": "fail"})
    assert len(page.cases()) == 3 and "4 more did not pass" in page.text
    assert ["timeline" in record for record in page.data["records"]] == [True] * 5 + [False] * 2
    assert [record.get("cut") for record in page.data["records"]] == [None] * 5 + [True] * 2


def test_against_shows_what_changed(tmp_path: Path) -> None:
    draw = random.Random(3)
    clean = [passing(n, draw) for n in range(4)]
    worse = [{**clean[0], "distances": {"output run max": 1e-3}}, {**clean[1], "verdict": "fail"}, clean[2]]
    before = write_run(tmp_path / "before", clean, {"verdict": "pass"})
    after = write_run(tmp_path / "after", worse, {"verdict": "fail"})
    text = Page(write_report(after, against=before)).text
    assert "Cases in both runs: 3. Verdicts that changed: 1. Distances that grew by more than 1 %: 1." in text
    assert "Cases gone: 1, new: 0." in text
    assert "Against" not in Page(write_report(after)).text


# ---- refusals ------------------------------------------------------------------------------------------------------


FAIL = '{"id": "a", "level": "kernel", "verdict": "fail", '


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"id": "a", "level": "kernel"', "not whole JSON"),
        ("[]", "must be an object"),
        ('{"level": "kernel", "verdict": "pass"}', "id: is missing"),
        ('{"id": "a", "level": "gpu", "verdict": "pass"}', "level: must be one of kernel, schedule, engine"),
        ('{"id": "a", "level": "kernel", "verdict": "ok"}', "verdict: must be one of"),
        (FAIL + '"limits": {"x": "1"}}', "limits.x: must be a number"),
        (FAIL + '"stock_reads": "here"}', "stock_reads: must be a list"),
        (FAIL + '"timeline": {"steps": []}}', "timeline.buffer_len: is missing"),
        (FAIL + '"timeline": {"buffer_len": 4, "steps": [{"rows": [{}]}]}}', "steps[0].rows[0].request: is missing"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "records.jsonl").write_text('{"id": "a", "level": "kernel", "verdict": "pass"}\n\n' + line + "\n")
    with pytest.raises(ReportError) as caught:
        write_report(tmp_path)
    message = str(caught.value)
    assert "records.jsonl:3: " in message and what in message and "\n" not in message


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"records\.jsonl: is missing"):
        write_report(tmp_path)
    write_run(tmp_path, [], {"verdict": "pass", "seed": "x"})
    with pytest.raises(ReportError, match=r"summary\.json: seed: must be an integer"):
        write_report(tmp_path)
    write_run(tmp_path, [], {"verdict": "pass"})
    (tmp_path / "timings.jsonl").write_text('{"id": "a", "level": "kernel"}\n')
    with pytest.raises(ReportError, match=r"timings\.jsonl:1: seconds: is missing"):
        write_report(tmp_path)


# ---- in a browser --------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]  # fmt: skip


def drawn(page: Path, profile: Path, fragment: str = "") -> str:
    command = [str(BROWSER), *QUIET, f"--user-data-dir={profile}", "--dump-dom", page.as_uri() + fragment]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no chromium to draw the timeline with")
def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    body = drawn(write_report(sample_run(tmp_path / "run")), tmp_path / "profile").split("<main>")[1]
    tip = "step 12, row 2: request 0\ndecode of token 11, slot 3\nwrite_pos 0, no flush\ngot write_pos 1, right 0"
    assert "first bad: row 2, head 2, token 11; got write_pos 1, right 0" in body
    assert body.count('class="bad"') == 2, "the cell and its entry in the legend"
    assert tip in body
    assert "one-token prompt tail, runs as decode of token 8" in body
    assert "3 rows padded to 4" in body and "request 2 aborted" in body and "request 0 preempted" in body
    assert body.count('<details class="case') == 3, "passes stay folded"


@pytest.mark.skipif(BROWSER is None, reason="no chromium to follow the link with")
def test_a_link_opens_its_case(tmp_path: Path) -> None:
    page = write_report(sample_run(tmp_path / "run"))
    body = drawn(page, tmp_path / "profile", "#case=kernel-00001").split("<main>")[1]
    assert body.count('<details class="case') == 1 and '<details class="case pass" open' in body
