"""The directory of a fault run: faults.json and the minimised cases."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from .fault_run import Hunt
from .record import failure_name
from .run_dir import make_dir


class FaultDir:
    """Writes below ``path`` after each fault, so that what is known survives a kill."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_dir(path, ("faults.json", "records.jsonl"))
        shutil.rmtree(path / "failures", ignore_errors=True)

    def write(self, found: Sequence[Hunt]) -> None:
        """faults.json with all hunts so far, and the last one's case."""
        data = {"faults": [hunt.to_json() for hunt in found]}
        (self.path / "faults.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        if found[-1].case is not None:
            (self.path / "failures").mkdir(exist_ok=True)
            name = failure_name(found[-1].fault, found[-1].level)
            (self.path / "failures" / name).write_text(found[-1].case.dumps(), encoding="utf-8")
