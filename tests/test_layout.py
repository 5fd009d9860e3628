"""The folder map in code: who may import whom, what must not exist, what the wheel must hold.

Imports are read from the source with ast, functions included, so nothing of the package has to be importable.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("cases", "oracles", "kernels", "harness", "reports")
# folder -> folders it may import besides itself
ARROWS: dict[str, set[str]] = {
    "cases": set(),
    "oracles": {"cases"},
    "kernels": set(),
    "harness": {"cases", "oracles", "kernels"},
    "reports": {"harness"},
}
REPORTS_MAY_READ = {"harness.record", "harness.verdict"}
VLLM_FILES = {
    "harness/cpu_platform.py",
    "harness/real_builder.py",
    "harness/engine_worker.py",
    "harness/directed_scheduler.py",
    "harness/engine_sync.py",
    "harness/graphs.py",
    "harness/serving_child.py",
}
HEAVY_FOR_CASES = {"vllm", "triton"}


def sources(folder: str) -> list[Path]:
    """Python files of a folder, subfolders included."""
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, folder: str) -> Iterator[tuple[str, bool]]:
    """(absolute module below replay_parity or an outside one, whether it stands at module level)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in tree.body}
    package = path.relative_to(ROOT).parent.parts if path.is_relative_to(ROOT) else (folder,)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            for alias in node.names:
                name = ".".join((*base, *(node.module or "").split("."))).strip(".")
                whole = name or alias.name
                yield (f"replay_parity.{whole}" if node.level else whole), id(node) in top


def ours(path: Path, folder: str) -> set[str]:
    """Modules of ours that a file imports, below replay_parity."""
    return {
        name.removeprefix("replay_parity.") for name, _ in imports(path, folder) if name.startswith("replay_parity")
    }


def arrow_breaks(path: Path, folder: str) -> list[str]:
    """Imports that the arrows forbid."""
    allowed = ARROWS[folder] | {folder}
    return [f"{path.name} imports {name}" for name in ours(path, folder) if name.split(".")[0] not in allowed]


@pytest.mark.parametrize("folder", FOLDERS)
def test_arrows(folder: str) -> None:
    assert [line for path in sources(folder) for line in arrow_breaks(path, folder)] == []


def test_reports_read_records_and_verdicts_only() -> None:
    read = {name for path in sources("reports") for name in ours(path, "reports") if name.startswith("harness")}
    assert read <= REPORTS_MAY_READ
    outside = {name.split(".")[0] for path in sources("reports") for name, _ in imports(path, "reports")}
    assert not outside & {"torch", "vllm", "triton"}


def test_arrow_check_rejects(tmp_path: Path) -> None:
    planted = tmp_path / "recurrence.py"
    planted.write_text("def late() -> None:\n    from ..kernels.cursor import decode_cursor\n", encoding="utf-8")
    assert arrow_breaks(planted, "oracles") == ["recurrence.py imports kernels.cursor"]
    assert arrow_breaks(planted, "harness") == []


def test_vllm_is_imported_only_behind_its_doors() -> None:
    for folder in FOLDERS:
        for path in sources(folder):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith("kernels/vllm_"):
                continue
            for module, at_top in imports(path, folder):
                if module.split(".")[0] != "vllm":
                    continue
                assert name in VLLM_FILES, f"{name} imports {module}"
                assert not at_top, f"{name} imports {module} at module level"


def test_cases_need_no_vllm_and_no_triton() -> None:
    outside = {module.split(".")[0] for path in sources("cases") for module, _ in imports(path, "cases")}
    assert not outside & HEAVY_FOR_CASES
    users = [
        path.name for path in sources("cases") if "hypothesis" in {m.split(".")[0] for m, _ in imports(path, "cases")}
    ]
    assert users in ([], ["strategies.py"])


def test_kernels_is_no_regular_package() -> None:
    # transformers probes for a package named kernels and imports what it finds
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_wheel_lists_every_folder() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    found = {
        "replay_parity." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in sources(folder)
    }
    assert listed == found


def test_files_stay_small() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): count
        for folder in FOLDERS
        for path in sources(folder)
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert long == {}
