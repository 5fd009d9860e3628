"""One place where this project leans on vLLM, as an entry of the table in `vllm_seams`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["module", "class", "function", "method", "attribute", "environment", "operator", "entry_point"]
# parameters beside those named: "optional" ones only (we call it), "any" (our override passes them on), "none" (our
# override takes no others)
Others = Literal["optional", "any", "none"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Seam:
    """One name of vLLM's by dotted path, and what of it has to stay as it is; lists are words with spaces between.

    ``in_order``: parameters that are passed by position, the first ones there are; ``by_name``: those passed by name.
    ``attributes``: of a class, those that are read or replaced on its objects. ``uses``: names that its code has to
    mention, else something of ours there is never asked. ``value``: text that the attribute or
    entry point must hold. ``device``: where it matters, None for everywhere.
    """

    name: str
    kind: Kind
    use: str
    in_order: str = ""
    by_name: str = ""
    others: Others = "optional"
    attributes: str = ""
    uses: str = ""
    value: str | None = None
    device: Device | None = None
