"""Which Cases a level can play, told without opening it."""

from __future__ import annotations

from ..cases.case import Case
from ..cases.geometry import ENGINE, ENGINE_BLOCK
from ..cases.split import split_as_vllm
from ..cases.timeline import play
from .architectures import DEFAULT_ARCHITECTURE
from .engine_trace import EngineConfig

# rows: vLLM captures no graph of more than its max_num_seqs
ENGINE_ROWS = EngineConfig.max_num_seqs


def cannot_play(level: str, case: Case, architecture: str = DEFAULT_ARCHITECTURE) -> str | None:
    """None where the level can play the Case, else one line that names the field; ``architecture`` of the engine's."""
    if level != "engine":
        return _cannot_play_in_layer(case)
    if case.graphs is not None and max(case.graphs.capture_sizes) > ENGINE_ROWS:
        return f"graphs.capture_sizes: the engine level runs at most {ENGINE_ROWS} rows; leave larger sizes out"
    if (case.cache.mode == "align" or case.cache.num_blocks) and case.cache.block_size != ENGINE_BLOCK:
        return f"cache.block_size: a block of the engine level's checkpoint holds {ENGINE_BLOCK} tokens; use that"
    if case.inputs.regime == "trained" and architecture != DEFAULT_ARCHITECTURE:
        return f"inputs.regime: there is a trained checkpoint of {DEFAULT_ARCHITECTURE} alone; use model_like"
    if case.inputs.regime == "trained" and case.geometry != ENGINE:
        return f"geometry: the trained checkpoint has {ENGINE}; use that"
    for name in ("activation_dtype", "ring_dtype", "state_dtype"):
        if getattr(case.replay, name) != "float32":
            return f"replay.{name}: the engine level is judged in float32 only; use float32"
    return _unlike_split(case) if case.cache.mode == "align" else None


def _unlike_split(case: Case) -> str | None:
    """The first chunk that vLLM would cut otherwise."""
    block = case.cache.block_size
    for index, step in enumerate(play(case).steps):
        for item, row in enumerate(step.rows):
            prompt_len = case.requests[row.request].prompt_len
            known = row.prefill_len if row.num_computed < row.prefill_len else row.num_computed + 1
            granted = split_as_vllm(row.num_computed, row.num_tokens, prompt_len, known, block)
            if granted != row.num_tokens:
                end = "none of it is scheduled" if granted == 0 else f"it ends after {granted}"
                return (
                    f"steps[{index}].rows[{item}]: the engine's scheduler does not run a chunk of {row.num_tokens} "
                    f"tokens over {row.num_computed} of {known} in blocks of {block}: {end}; cut at block ends"
                )
    return None


def _cannot_play_in_layer(case: Case) -> str | None:
    if case.inputs.regime == "trained":
        return "inputs.regime: trained is text for a whole model, which only the engine level has; use model_like"
    return None
