"""Every place where this project leans on vLLM: what is imported, subclassed, overridden, called, read or replaced.

Data, which `vllm_drift` holds beside the vLLM that is installed. Imports nothing of vLLM.
"""

from __future__ import annotations

from .seam import Seam
from .vllm_engine_seams import ENGINE, GRAPHS, SCHEDULER, SWITCHES, SYNCS
from .vllm_plugin_seams import METADATA, MODEL, PLUGIN

# releases by their first two numbers, and what is known of them
VERSIONS = {"0.32": "run", "0.33": "read, not run"}

SEAMS: tuple[Seam, ...] = (*SWITCHES, *PLUGIN, *MODEL, *METADATA, *SCHEDULER, *ENGINE, *GRAPHS, *SYNCS)
