"""How this tests, in plain words: the guard is fed one wrong setting at a time, and the real builder whole batches.

The guard needs no vLLM: a namespace with a VllmConfig's fields stands in. The builder is vLLM's own, built on a CPU
from such a namespace, and given CommonAttentionMetadata as Model Runner V2 makes it; expected cursors are written out
by hand from the rule write_pos = (num_computed - base) % L. Builder tests are skipped where no engine is installed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from replay_parity.harness import cpu_platform
from replay_parity.kernels.vllm_config import (
    MODEL_TYPES,
    ReplayConfigError,
    ReplaySettings,
    parse_settings,
    replay_settings,
    require_supported,
)


def config(**changes: Any) -> Any:
    """A configuration that the guard lets pass, with ``changes`` to fields by their own name."""
    value = {
        "additional_config": {"gdn_replay": {"buffer_len": 4, "ring_dtype": "float32"}},
        "speculative_config": None,
        "use_v2_model_runner": True,
        "model_type": "qwen3_5_text",
        "architecture": "Qwen3_5ForCausalLM",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "mamba_cache_mode": "none",
        "multimodal_config": None,
    } | changes
    text = SimpleNamespace(model_type=value["model_type"], linear_key_head_dim=4, linear_value_head_dim=4)
    return SimpleNamespace(
        additional_config=value["additional_config"],
        speculative_config=value["speculative_config"],
        use_v2_model_runner=value["use_v2_model_runner"],
        model_config=SimpleNamespace(
            hf_text_config=text, architecture=value["architecture"], multimodal_config=value["multimodal_config"]
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=value["tensor_parallel_size"],
            pipeline_parallel_size=value["pipeline_parallel_size"],
            decode_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(mamba_cache_mode=value["mamba_cache_mode"]),
        # what vLLM's builder reads besides
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True), max_cudagraph_capture_size=None
        ),
        num_speculative_tokens=0,
    )


def prompts(**limits: int) -> Any:
    """A multimodal configuration with limits per prompt, 0 for what is not named."""
    return SimpleNamespace(get_limit_per_prompt=lambda modality: limits.get(modality, 0))


MULTIMODAL = {"architecture": "Qwen3_5ForConditionalGeneration", "multimodal_config": prompts()}


# --- the switch and the guard -------------------------------------------------------------------------------------


def test_supported_configuration_gives_settings() -> None:
    assert replay_settings(config()) == ReplaySettings(buffer_len=4, ring_dtype="float32")
    assert replay_settings(config(mamba_cache_mode="align")) is not None


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_each_architecture_is_served_with_its_own_model_type_only(architecture: str) -> None:
    right = MODEL_TYPES[architecture]
    wrong = next(model_type for model_type in MODEL_TYPES.values() if model_type != right)
    multimodal = prompts() if "Conditional" in architecture else None
    for model_type in (right, wrong):
        asked = config(architecture=architecture, model_type=model_type, multimodal_config=multimodal)
        if model_type == right:
            require_supported(asked)
        else:
            with pytest.raises(ReplayConfigError, match=f"model: gdn_replay does not serve {architecture}"):
                require_supported(asked)


@pytest.mark.parametrize("additional", [{}, {"gdn_prefill_backend": "triton"}, object()])
def test_without_the_key_nothing_is_asked_and_nothing_refused(additional: object) -> None:
    assert replay_settings(config(additional_config=additional, model_type="llama", tensor_parallel_size=8)) is None


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("speculative_config", {"speculative_config": object()}),
        ("tensor_parallel_size", {"tensor_parallel_size": 2}),
        ("pipeline_parallel_size", {"pipeline_parallel_size": 2}),
        ("model", {"model_type": "qwen3_next"}),
        ("model", {"model_type": "qwen3_5_moe_text"}),
        ("model", {"architecture": "Qwen3NextForCausalLM"}),
        ("model", {"architecture": "Qwen3_5MTP"}),
        ("language_model_only", MULTIMODAL | {"multimodal_config": prompts(image=1)}),
        ("language_model_only", MULTIMODAL | {"multimodal_config": prompts(video=1)}),
        ("mamba_cache_mode", {"mamba_cache_mode": "all"}),
        ("VLLM_USE_V2_MODEL_RUNNER", {"use_v2_model_runner": False}),
    ],
)
def test_guard_refuses_in_one_line_that_names_field_and_fix(field: str, changes: dict[str, Any]) -> None:
    require_supported(config())
    with pytest.raises(ReplayConfigError) as caught:
        replay_settings(config(**changes))
    message = str(caught.value)
    assert caught.value.field == field
    assert message.startswith(f"{field}: ") and message.endswith(caught.value.fix) and "\n" not in message


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (None, ""),
        ([16], ""),
        ({"buffer_length": 16}, ".buffer_length"),
        ({"buffer_len": 0}, ".buffer_len"),
        ({"buffer_len": True}, ".buffer_len"),
        ({"buffer_len": 4.0}, ".buffer_len"),
        ({"ring_dtype": "fp8"}, ".ring_dtype"),
        ({"ring_dtype": ["float16"]}, ".ring_dtype"),
    ],
)
def test_malformed_settings_are_refused_by_name(raw: object, field: str) -> None:
    with pytest.raises(ReplayConfigError) as caught:
        parse_settings(raw)
    assert caught.value.field == f"additional_config.gdn_replay{field}" and "\n" not in str(caught.value)


def test_empty_settings_mean_the_usual_ring() -> None:
    assert parse_settings({}) == ReplaySettings(buffer_len=16, ring_dtype="float16")


# --- the builder --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metadata_module() -> Any:
    """kernels/vllm_metadata, which imports vLLM; skipped where no engine is installed."""
    try:
        cpu_platform.prepare()
    except cpu_platform.EngineUnavailable as error:
        pytest.skip(str(error))
    from replay_parity.kernels import vllm_metadata

    return vllm_metadata


def make_builder(module: Any, mode: str = "none", block_size: int = 512, **changes: Any) -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    shapes, dtypes = ((3, 8), (2, 4, 4)), (torch.float32, torch.float32)
    spec = MambaSpec(block_size=block_size, shapes=shapes, dtypes=dtypes, mamba_cache_mode=mode)
    return module.ReplayMetadataBuilder(spec, ["layer"], config(mamba_cache_mode=mode, **changes), torch.device("cpu"))


def batch(rows: list[tuple[int, int]], prefilling: list[bool] | None = None, blocks: int = 1) -> Any:
    """Metadata of rows (num_computed, query_len); row i lives in slot 10 + i, padding (0, 0) in slot 0."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    computed = torch.tensor([row[0] for row in rows], dtype=torch.int32)
    lens = torch.tensor([row[1] for row in rows], dtype=torch.int32)
    start = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)])
    slots = [[10 + i if row[1] else 0] * blocks for i, row in enumerate(rows)]
    # a FULL graph pads tokens like rows: one each
    num_tokens = max(int(start[-1]), len(rows)) if int(lens.max()) == 1 else int(start[-1])
    return CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=computed + lens,
        seq_lens_cpu_upper_bound=computed + lens,
        num_reqs=len(rows),
        num_actual_tokens=num_tokens,
        max_query_len=int(lens.max()),
        max_seq_len=int((computed + lens).max()),
        block_table_tensor=torch.tensor(slots, dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        is_prefilling=torch.tensor(prefilling if prefilling is not None else [False] * len(rows)),
    )


def build(builder: Any, base: list[int], m: Any) -> Any:
    builder.replayssm_decode_base_cpu = torch.tensor(base)
    return builder.build(0, m)


def test_build_without_a_base_is_an_error_and_a_base_serves_one_step(metadata_module: Any) -> None:
    builder = make_builder(metadata_module)
    with pytest.raises(metadata_module.ReplayMetadataError, match="no decode base"):
        builder.build(0, batch([(10, 1)]))
    build(builder, [10], batch([(10, 1)]))
    with pytest.raises(metadata_module.ReplayMetadataError, match="no decode base"):
        builder.build(0, batch([(11, 1)]))
    with pytest.raises(metadata_module.ReplayMetadataError, match="1 rows, the step 2"):
        build(builder, [10], batch([(11, 1), (12, 1)]))


def test_mixed_batch_has_cursors_in_front_and_stock_prefill_behind(metadata_module: Any) -> None:
    """Rows: third decode after a resume at 10, a one-token tail of a 9-token prompt, a first chunk of 7."""
    metadata = build(make_builder(metadata_module), [10, 9, 17], batch([(13, 1), (8, 1), (0, 7)], [False, False, True]))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.write_pos.tolist() == [3, 0, 0]
    assert metadata.is_flush.tolist() == [True, True, False]
    assert (metadata.num_replay_rows, metadata.num_flush_rows) == (2, 2)
    assert metadata.prefill_query_lens == (7,) and metadata.prefill_has_context == (False,)
    chunks = metadata.prefill_only
    assert (chunks.num_decodes, chunks.num_prefills, chunks.num_actual_tokens) == (0, 1, 7)
    assert chunks.non_spec_query_start_loc.tolist() == [0, 7]
    assert chunks.non_spec_state_indices_tensor.tolist() == [12]
    assert chunks.has_initial_state.tolist() == [False]


def test_first_chunk_of_one_token_stays_a_prefill_without_context(metadata_module: Any) -> None:
    """Its slot still holds a former request, which a decode would read."""
    metadata = build(make_builder(metadata_module), [6, 1], batch([(6, 1), (0, 1)], [False, True]))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_replay_rows) == (1, 1, 1)
    assert metadata.prefill_query_lens == (1,) and metadata.prefill_has_context == (False,)


def test_decode_row_behind_a_first_chunk_is_refused(metadata_module: Any) -> None:
    builder = make_builder(metadata_module)
    order = [True, False]
    with pytest.raises(metadata_module.ReplayMetadataError, match="row 1 has tokens pending"):
        build(builder, [1, 6], batch([(0, 1), (8, 1)], order))
    # nothing pending: one decoded block of four later, or a prompt tail over a cached prefix
    assert build(builder, [1, 6], batch([(0, 1), (10, 1)], order)).num_prefills == 2
    assert build(builder, [1, 9], batch([(0, 1), (8, 1)], order)).num_prefills == 2


def test_padding_and_buffers_that_graphs_read(metadata_module: Any) -> None:
    """Addresses stay; a smaller step leaves nothing of a larger one behind it."""
    builder = make_builder(metadata_module)
    full = build(builder, [5] * 4, batch([(8, 1)] * 4))
    addresses = full.write_pos.data_ptr(), full.is_flush.data_ptr(), full.non_spec_state_indices_tensor.data_ptr()
    assert full.write_pos.tolist() == [3] * 4 and full.is_flush.tolist() == [True] * 4
    padded = build(builder, [5, 6, 0, 0], batch([(6, 1), (9, 1), (0, 0), (0, 0)]))
    assert addresses == (
        padded.write_pos.data_ptr(), padded.is_flush.data_ptr(), padded.non_spec_state_indices_tensor.data_ptr()
    )  # fmt: skip
    assert padded.write_pos.tolist() == [1, 3, 0, 0] and padded.is_flush.tolist() == [False, True, False, False]
    assert padded.non_spec_state_indices_tensor.tolist() == [10, 11, 0, 0]
    assert (padded.num_decodes, padded.num_replay_rows) == (4, 2)
    build(builder, [5], batch([(6, 1)]))
    assert builder.write_pos.tolist() == [1] + [0] * 7 and not builder.is_flush.any()


def test_align_anchors_and_flushes_at_the_mamba_block(metadata_module: Any) -> None:
    """Block 8, L 4. Base 5: 6 -> 1 pending; 7 ends the block, a flush at write_pos 2; 8 starts anew."""
    builder = make_builder(metadata_module, mode="align", block_size=8)
    for computed, expected in ((6, (1, False)), (7, (2, True)), (8, (0, False)), (9, (1, False))):
        step = build(builder, [5], batch([(computed, 1)], blocks=4))
        assert (int(step.write_pos[0]), bool(step.is_flush[0])) == expected


def test_observer_gets_copies_of_every_step(metadata_module: Any) -> None:
    steps: list[Any] = []
    builder = make_builder(metadata_module)
    metadata_module.set_step_observer(steps.append)
    try:
        metadata = build(builder, [5, 9, 0], batch([(6, 1), (8, 1), (0, 0)]))
    finally:
        metadata_module.set_step_observer(None)
    build(builder, [5], batch([(8, 1)]))
    (step,) = steps
    assert (step.num_reqs, step.num_reqs_after_padding, step.layer_names) == (2, 3, ("layer",))
    assert step.decode_base.tolist() == [5, 9, 0] and step.num_computed.tolist() == [6, 8, 0]
    assert step.query_len.tolist() == [1, 1, 0] and step.runs_as_decode.tolist() == [True, True, False]
    assert step.write_pos.tolist() == [1, 0, 0] and step.is_flush.tolist() == [False, True, False]
    metadata.non_spec_state_indices_tensor.fill_(7)
    assert step.state_indices.tolist() == [10, 11, 0]


def test_builder_without_the_key_is_refused(metadata_module: Any) -> None:
    with pytest.raises(metadata_module.ReplayMetadataError, match="gdn_replay"):
        make_builder(metadata_module, additional_config={})


def test_decode_base_is_a_zero_filled_snapshot(metadata_module: Any) -> None:
    from replay_parity.kernels.vllm_model_state import decode_base_snapshot

    live = np.array([9, 17], dtype=np.int32)
    base = decode_base_snapshot(SimpleNamespace(num_reqs=2, num_reqs_after_padding=4, prefill_len_np=live))
    live[:] = 99
    assert base.tolist() == [9, 17, 0, 0] and base.device.type == "cpu"


def test_registering_again_changes_nothing(metadata_module: Any) -> None:
    """vLLM calls the entry point in each process, and may do so twice; its own registry asserts on duplicates."""
    from replay_parity.kernels.vllm_layer import ReplayGatedDeltaNetAttention
    from replay_parity.kernels.vllm_plugin import register
    from vllm import ModelRegistry
    from vllm.model_executor.custom_op import op_registry_oot

    register()
    register()
    assert op_registry_oot["QwenGatedDeltaNetAttention"] is ReplayGatedDeltaNetAttention
    for architecture in MODEL_TYPES:
        registered = ModelRegistry.models[architecture].load_model_cls()
        assert registered.__name__ == f"Replay{architecture}"


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, "image and video"),
        ({"limit_per_prompt": {"image": 0}}, "video"),
        ({"limit_per_prompt": {"image": 0, "video": 0}}, None),
        ({"language_model_only": True}, None),
    ],
)
def test_prompts_are_limited_as_vllm_understands_it(
    metadata_module: Any, settings: dict[str, Any], refused: str | None
) -> None:
    from vllm.config import MultiModalConfig

    asked = config(**MULTIMODAL | {"multimodal_config": MultiModalConfig(**settings)})
    if refused is None:
        require_supported(asked)
        return
    with pytest.raises(ReplayConfigError, match=f"language_model_only: gdn_replay is untested with {refused} prompts"):
        require_supported(asked)


def test_stock_models_name_no_model_state_of_their_own(metadata_module: Any) -> None:
    """Ours is a subclass of what vLLM takes for them; a stock class that names its own would need another base."""
    from replay_parity.kernels.vllm_model_state import ReplayModelState
    from vllm.model_executor.models import qwen3_5
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

    hybrid = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=True),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    stock = resolve_model_state_cls(hybrid, torch.nn.Module())
    assert stock is not ReplayModelState and issubclass(ReplayModelState, stock)
    for architecture in MODEL_TYPES:
        assert not hasattr(getattr(qwen3_5, architecture), "get_model_state_cls")
