"""Seams of the plugin (kernels/vllm_*.py): registration and settings, model and layer, metadata."""

from __future__ import annotations

from .seam import Seam

_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_LAYER = f"{_GDN}.QwenGatedDeltaNetAttention"
_GDN_ATTN = "vllm.v1.attention.backends.gdn_attn"
_BUILDER = f"{_GDN_ATTN}.GDNAttentionMetadataBuilder"
_MODELS = tuple(
    f"vllm.model_executor.models.qwen3_5.{name}"
    for name in (
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    )
)
_STATES = "vllm.v1.worker.gpu.model_states"

PLUGIN = (
    Seam(
        "vllm.general_plugins",
        "entry_point",
        "vLLM loads our plugin by it",
        value="replay_parity.kernels.vllm_plugin:register",
    ),
    Seam(
        "vllm.plugins.DEFAULT_PLUGINS_GROUP",
        "attribute",
        "the group in which our entry point stands",
        value="vllm.general_plugins",
    ),
    Seam("vllm.plugins.load_general_plugins", "function", "loads the plugin before an engine is made"),
    Seam("vllm.ModelRegistry", "attribute", "our model is registered here"),
    Seam(
        "vllm.model_executor.models.registry._ModelRegistry.register_model",
        "method",
        "puts our model in the place of the stock one",
        in_order="model_arch model_cls",
    ),
    Seam(
        "vllm.model_executor.models.registry._ModelRegistry",
        "class",
        "registered classes are looked up by architecture",
        attributes="models",
    ),
    Seam(
        "vllm.model_executor.models.registry._BaseRegisteredModel.load_model_cls",
        "method",
        "loads the registered class in this process",
    ),
    Seam("vllm.platforms.current_platform", "attribute", "which path the plugin takes"),
    Seam("vllm.platforms.interface.Platform.is_cpu", "method", "on a CPU the class itself is registered"),
    Seam("vllm.platforms.interface.Platform.is_xpu", "method", "a platform that the plugin refuses"),
    Seam(
        "vllm.config.VllmConfig",
        "class",
        "settings that the plugin's guard and builder read",
        attributes="additional_config cache_config compilation_config model_config parallel_config scheduler_config "
        "speculative_config use_v2_model_runner",
    ),
    Seam(
        "vllm.config.ModelConfig",
        "class",
        "which model is served",
        attributes="architecture hf_text_config get_vocab_size multimodal_config",
    ),
    Seam(
        "vllm.config.multimodal.MultiModalConfig.get_limit_per_prompt",
        "method",
        "the guard refuses prompts with pictures",
        in_order="modality",
    ),
    Seam(
        "vllm.config.ParallelConfig",
        "class",
        "the guard refuses more than one",
        attributes="tensor_parallel_size pipeline_parallel_size",
    ),
    Seam("vllm.config.CacheConfig", "class", "cache mode and block size", attributes="block_size mamba_cache_mode"),
    Seam("vllm.config.SchedulerConfig", "class", "rows that the builder keeps room for", attributes="max_num_seqs"),
    Seam(
        "vllm.config.CompilationConfig",
        "class",
        "how the model runs, graph sizes, and the layers by name",
        attributes="cudagraph_capture_sizes cudagraph_mode mode static_forward_context",
    ),
)

MODEL = (
    *(Seam(name, "class", "base of a model of ours", by_name="vllm_config prefix", others="none") for name in _MODELS),
    *(
        Seam(
            f"{name}.{method}",
            "method",
            "overridden: the ring's tensors come after stock's",
            in_order="vllm_config",
            others="none",
        )
        for name in _MODELS
        for method in ("get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config")
    ),
    Seam(
        f"{_STATES}.resolve_model_state_cls",
        "function",
        "asks our model for its state class",
        uses="get_model_state_cls",
    ),
    Seam(f"{_STATES}.mamba_hybrid.MambaHybridModelState", "class", "our model state's base"),
    Seam(
        f"{_STATES}.mamba_hybrid.MambaHybridModelState.prepare_attn",
        "method",
        "overridden: the decode base is set on the builders before metadata is built",
        in_order="input_batch cudagraph_mode block_tables slot_mappings attn_groups",
        others="any",
    ),
    Seam(
        "vllm.v1.worker.gpu.input_batch.InputBatch",
        "class",
        "the decode base and the padded size of a step",
        attributes="num_reqs num_reqs_after_padding prefill_len_np seq_lens req_ids idx_mapping_np",
    ),
    Seam(
        "vllm.v1.worker.utils.AttentionGroup",
        "class",
        "which layers a builder serves",
        attributes="kv_cache_spec layer_names",
    ),
    Seam(
        "vllm.v1.worker.utils.AttentionGroup.get_metadata_builder",
        "method",
        "the builder that is given the decode base",
        in_order="ubatch_id",
    ),
    Seam("vllm.model_executor.custom_op.op_registry_oot", "attribute", "whether our layer is registered already"),
    Seam(
        f"{_LAYER}.register_oot", "method", "lets vLLM build every GDN layer as ours", in_order="_decorated_layer_cls"
    ),
    Seam(
        _LAYER,
        "class",
        "our layer's base",
        in_order="config vllm_config",
        others="any",
        attributes="A_log activation conv1d dt_bias head_k_dim head_v_dim key_dim kv_cache num_k_heads prefix tp_size",
    ),
    Seam(f"{_LAYER}.get_state_shape", "method", "overridden: with the ring", others="none"),
    Seam(f"{_LAYER}.get_state_dtype", "method", "overridden: with the ring", others="none"),
    Seam(f"{_LAYER}.get_attn_backend", "method", "overridden: our backend", others="none"),
    Seam(
        f"{_LAYER}.forward_cpu",
        "method",
        "overridden: the CUDA forward around our core",
        in_order="hidden_states",
        others="none",
    ),
    Seam(
        f"{_LAYER}.forward_hip",
        "method",
        "overridden: the CUDA forward, not AITER's",
        in_order="hidden_states",
        others="none",
    ),
    Seam(
        f"{_LAYER}.forward_cuda",
        "method",
        "projections around the operator that calls our core",
        in_order="hidden_states",
        uses="qwen_gdn_attention_core",
    ),
    Seam(f"{_GDN}.qwen_gdn_attention_core", "function", "calls our core", uses="_forward_core"),
    Seam(
        f"{_LAYER}._forward_core",
        "method",
        "overridden: decode rows by replay, prefill rows by stock code",
        in_order="mixed_qkv b a core_attn_out",
        others="none",
    ),
    Seam(
        f"{_LAYER}._warmup_prefill_kernels",
        "method",
        "overridden: stock's unpacks two state dtypes",
        in_order="qkv_or_qkvz",
        others="any",
    ),
    Seam("vllm.forward_context.get_forward_context", "function", "the metadata of the step under way"),
    Seam(
        "vllm.forward_context.ForwardContext",
        "class",
        "replaced while stock code prefills a mixed batch",
        attributes="attn_metadata",
    ),
    Seam("vllm.model_executor.layers.mamba.mamba_utils.is_conv_state_dim_first", "function", "the conv cache's layout"),
    Seam(
        "vllm.model_executor.layers.mamba.ops.causal_conv1d.causal_conv1d_update",
        "function",
        "convolution of decode rows with CUDA",
        in_order="x conv_state weight bias activation",
        by_name="conv_state_indices validate_data",
    ),
    Seam(
        "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",
        "function",
        "keeps the plain conv weight where it packs one",
        uses="_cpu_unpacked_conv_weight",
        device="cpu",
    ),
    Seam(
        "vllm.third_party.flash_linear_attention.ops.fused_recurrent_gated_delta_rule_packed_decode",
        "function",
        "vLLM's packed decode, which a benchmark holds ours against",
        by_name="mixed_qkv a b A_log dt_bias scale initial_state out ssm_state_indices use_qk_l2norm_in_kernel",
    ),
)

METADATA = (
    Seam(
        "vllm.utils.torch_utils.async_tensor_h2d",
        "function",
        "cursors into the buffers that graphs read",
        in_order="data",
        by_name="out",
    ),
    Seam(f"{_GDN_ATTN}.GDNAttentionBackend", "class", "our backend's base"),
    Seam(f"{_GDN_ATTN}.GDNAttentionBackend.get_builder_cls", "method", "overridden: our builder", others="none"),
    Seam(
        f"{_GDN_ATTN}.GDNAttentionMetadata",
        "class",
        "our metadata's base; fields for prefill rows alone are replaced",
        by_name="num_prefills num_prefill_tokens num_decodes num_decode_tokens num_actual_tokens has_initial_state "
        "prefill_has_initial_state non_spec_state_indices_tensor prefill_state_indices "
        "non_spec_query_start_loc prefill_query_start_loc nums_dict batch_ptr token_chunk_offset_ptr",
        others="any",
    ),
    Seam(
        _BUILDER,
        "class",
        "our builder's base",
        in_order="kv_cache_spec layer_names vllm_config device",
        others="none",
        attributes="decode_cudagraph_max_bs layer_names non_spec_state_indices_tensor",
    ),
    Seam(
        f"{_BUILDER}.build",
        "method",
        "overridden: stock metadata with the step's cursors",
        in_order="common_prefix_len common_attn_metadata num_accepted_tokens num_decode_draft_tokens_cpu fast_build",
        others="none",
        uses="_stage_decode",
    ),
    Seam(f"{_BUILDER}._stage_decode", "method", "a planted fault edits it"),
    Seam(
        "vllm.v1.attention.backends.utils.compute_causal_conv1d_metadata",
        "function",
        "convolution plan of the prefill rows of a mixed batch",
        in_order="query_start_loc_p_cpu",
        by_name="device",
    ),
    Seam(
        "vllm.v1.attention.backend.CommonAttentionMetadata",
        "class",
        "made for the real builder, and read by it",
        by_name="query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs num_actual_tokens "
        "max_query_len max_seq_len block_table_tensor slot_mapping is_prefilling",
    ),
    Seam(
        "vllm.v1.kv_cache_interface.MambaSpec",
        "class",
        "the cache group of GDN layers",
        by_name="block_size shapes dtypes mamba_cache_mode",
    ),
)
