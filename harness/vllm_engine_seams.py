"""Seams of the engine level (harness/): switches, scheduler, engine and its requests, graphs, host reads."""

from __future__ import annotations

from .seam import Seam

_SCHED = "vllm.v1.core.sched"
_SCHEDULER = f"{_SCHED}.scheduler.Scheduler"
_CORE = "vllm.v1.core"
_KV = "vllm.v1.kv_cache_interface"
_LLM = "vllm.v1.engine.llm_engine.LLMEngine"
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_TABLES = "vllm.v1.worker.gpu.block_table.BlockTables"
_CPU = "vllm.platforms.cpu.CpuPlatform"

SWITCHES = (
    Seam("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", "environment", "Model Runner V2 is switched on"),
    Seam("vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING", "environment", "the engine runs in the process that opens it"),
    Seam("vllm.envs.VLLM_CACHE_ROOT", "environment", "a compiling engine keeps what it makes to itself"),
    Seam("vllm.envs.VLLM_USE_BREAKABLE_CUDAGRAPH", "environment", "whether vLLM would not compile"),
    Seam("vllm.envs.VLLM_GPU_SYNC_CHECK", "environment", "a host read with CUDA ends the step", device="cuda"),
    Seam("vllm.envs.VLLM_CPU_KVCACHE_SPACE", "environment", "gigabytes of cache on a CPU", device="cpu"),
    Seam("vllm.envs.VLLM_ENABLE_CUDAGRAPH_GC", "environment", "a capture does not freeze the heap", device="cpu"),
    Seam("vllm.envs.VLLM_LOGGING_LEVEL", "environment", "an engine that is quiet"),
    Seam("vllm.envs.VLLM_NO_USAGE_STATS", "environment", "an engine that reports to nobody"),
)

SCHEDULER = (
    Seam(
        _SCHEDULER,
        "class",
        "base of the scheduler that plays a script",
        attributes="has_requests kv_cache_config kv_cache_manager max_num_scheduled_tokens policy requests running "
        "waiting",
    ),
    Seam(
        f"{_SCHEDULER}.schedule",
        "method",
        "overridden: forced preemptions, order of rows, who waits",
        others="any",
        uses="_reserve_prefill_lookahead _mamba_block_aligned_split running waiting",
    ),
    Seam(
        f"{_SCHEDULER}._reserve_prefill_lookahead",
        "method",
        "overridden: tokens of each request in a step",
        in_order="request num_computed_tokens num_new_tokens",
        others="none",
    ),
    Seam(
        f"{_SCHEDULER}._mamba_block_aligned_split",
        "method",
        "overridden: the same before an aligned chunk is cut",
        in_order="request num_new_tokens",
        others="any",
    ),
    Seam(f"{_SCHEDULER}._preempt_request", "method", "forces a preemption by script", in_order="request timestamp"),
    Seam(f"{_SCHEDULER}.reset_prefix_cache", "method", "no prefix is left for the next Case"),
    Seam(
        "vllm.v1.engine.core.EngineCore",
        "class",
        "the way to scheduler and worker",
        attributes="model_executor scheduler vllm_config",
    ),
    Seam(
        "vllm.config.SchedulerConfig.get_scheduler_cls", "method", "takes our scheduler's class", uses="scheduler_cls"
    ),
    Seam(
        f"{_SCHED}.request_queue.create_request_queue", "function", "a new waiting queue each step", in_order="policy"
    ),
    Seam(f"{_SCHED}.request_queue.RequestQueue.add_request", "method", "who waits, in order", in_order="request"),
    Seam(
        f"{_SCHED}.output.SchedulerOutput",
        "class",
        "the rows of a step",
        attributes="num_scheduled_tokens preempted_req_ids scheduled_cached_reqs scheduled_new_reqs",
    ),
    Seam(f"{_SCHED}.output.CachedRequestData", "class", "running rows", attributes="num_computed_tokens req_ids"),
    Seam(
        f"{_SCHED}.output.NewRequestData",
        "class",
        "admitted and readmitted rows",
        attributes="num_computed_tokens prefill_token_ids req_id",
    ),
    Seam(
        "vllm.v1.request.Request",
        "class",
        "what a request has done",
        attributes="num_computed_tokens num_tokens request_id status",
    ),
    Seam(f"{_CORE}.kv_cache_manager.KVCacheManager", "class", "who holds which blocks", attributes="block_pool"),
    Seam(
        f"{_CORE}.kv_cache_manager.KVCacheManager.get_block_ids",
        "method",
        "blocks of a request, a list a group",
        in_order="request_id",
    ),
    Seam(f"{_CORE}.block_pool.BlockPool", "class", "all blocks", attributes="blocks"),
    Seam(f"{_CORE}.block_pool.BlockPool.get_num_free_blocks", "method", "why a step could not be played"),
    Seam(f"{_CORE}.kv_cache_utils.KVCacheBlock", "class", "whether a block is free", attributes="block_hash ref_cnt"),
    Seam(f"{_KV}.KVCacheConfig", "class", "groups of layers", attributes="kv_cache_groups"),
    Seam(f"{_KV}.KVCacheGroupSpec", "class", "layers of a group", attributes="kv_cache_spec layer_names"),
    Seam(
        f"{_RUNNER}.sort_batch_req_ids",
        "function",
        "the order of a step's rows",
        in_order="num_tokens_per_req draft_tokens decode_query_len",
    ),
)

ENGINE = (
    Seam(
        "vllm.engine.arg_utils.EngineArgs",
        "class",
        "what an engine is opened with",
        by_name="additional_config async_scheduling block_size compilation_config disable_log_stats dtype "
        "enable_prefix_caching enable_trace_replay enforce_eager gpu_memory_utilization load_format mamba_cache_mode "
        "language_model_only mamba_ssm_cache_dtype max_logprobs max_model_len max_num_batched_tokens max_num_seqs "
        "model num_gpu_blocks_override prefix_cache_retention_interval replayssm_buffer_len scheduler_cls seed "
        "skip_tokenizer_init use_replayssm",
    ),
    Seam(
        "vllm.compilation.wrapper.TorchCompileWithNoGuardsWrapper",
        "class",
        "whether a part of the model has been compiled",
        attributes="compiled",
    ),
    Seam("vllm.v1.engine.llm_engine", "module", "imported before children are forked"),
    Seam(_LLM, "class", "one engine", attributes="engine_core"),
    Seam(f"{_LLM}.from_engine_args", "method", "opens an engine", in_order="engine_args"),
    Seam(f"{_LLM}.step", "method", "one step"),
    Seam(f"{_LLM}.has_unfinished_requests", "method", "whether a load is done"),
    Seam(f"{_LLM}.add_request", "method", "a Case's request", in_order="request_id prompt params"),
    Seam(f"{_LLM}.abort_request", "method", "a Case's abort", in_order="request_ids", by_name="internal"),
    Seam("vllm.v1.engine.core_client.InprocClient", "class", "the engine in this process", attributes="engine_core"),
    Seam("vllm.v1.executor.uniproc_executor.UniProcExecutor", "class", "one worker", attributes="driver_worker"),
    Seam("vllm.v1.worker.worker_base.WorkerWrapperBase", "class", "the worker inside", attributes="worker"),
    Seam(
        _RUNNER + ".GPUModelRunner",
        "class",
        "Model Runner V2",
        attributes="cache_config cudagraph_manager kv_cache_config model_state vllm_config",
    ),
    Seam(
        "vllm.SamplingParams",
        "class",
        "forced tokens, log-probabilities of the whole vocabulary",
        by_name="detokenize flat_logprobs ignore_eos logprobs max_tokens output_kind temperature "
        "trace_decode_token_ids",
    ),
    Seam("vllm.sampling_params.RequestOutputKind", "class", "outputs step by step", attributes="DELTA"),
    Seam("vllm.outputs.RequestOutput", "class", "what a step gave a request", attributes="outputs request_id"),
    Seam("vllm.outputs.CompletionOutput", "class", "its tokens", attributes="logprobs token_ids"),
    Seam("vllm.logprobs.FlatLogprobs", "class", "its log-probabilities", attributes="logprobs token_ids"),
)

GRAPHS = (
    Seam(
        f"{_RUNNER}.GPUModelRunner.capture_model",
        "method",
        "captures anew, listened to",
    ),
    Seam(
        f"{_RUNNER}.GPUModelRunner.execute_model",
        "method",
        "asks what we listen to",
        uses="prepare_attn run_fullgraph",
    ),
    Seam(f"{_GRAPHS}.ModelCudaGraphManager.release_graphs", "method", "drops what the start captured"),
    Seam(f"{_GRAPHS}.ModelCudaGraphManager.run_fullgraph", "method", "replaced: which graph ran", in_order="desc"),
    Seam(f"{_GRAPHS}.BatchExecutionDescriptor", "class", "rows of a graph", attributes="num_reqs"),
    Seam(f"{_GRAPHS}.prepare_inputs_to_capture", "function", "metadata of a capture", uses="prepare_attn"),
    Seam(
        "vllm.v1.attention.backends.utils.mamba_get_block_table_tensor",
        "function",
        "the block of each row's state",
        in_order="block_table seq_lens kv_cache_spec mamba_cache_mode",
    ),
    Seam(f"{_TABLES}.gather_block_tables", "method", "a planted fault edits it"),
    Seam(f"{_TABLES}.get_dummy_block_tables", "method", "a planted fault edits it"),
    Seam(_CPU, "class", "replaced methods let a CPU have graphs", device="cpu"),
    Seam(
        f"{_CPU}.check_and_update_config",
        "method",
        "replaced: keeps the capture sizes",
        in_order="vllm_config",
        others="none",
        device="cpu",
    ),
    Seam(f"{_CPU}.support_static_graph_mode", "method", "replaced: graphs are there", others="none", device="cpu"),
    Seam("vllm.v1.attention.backend.AttentionCGSupport", "class", "what a backend's graphs can", attributes="ALWAYS"),
    Seam(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder",
        "class",
        "replaced: its attention goes into graphs",
        attributes="_cudagraph_support",
        device="cpu",
    ),
    Seam("vllm.v1.worker.workspace.init_workspace_manager", "function", "scratch memory", in_order="device"),
    Seam("_C::get_scheduler_metadata", "operator", "made anew for each replay", device="cpu"),
)

SYNCS = (
    Seam("vllm.utils.gpu_sync_debug", "module", "vLLM's own check of host reads"),
    Seam("vllm.utils.gpu_sync_debug._SYNC_CHECK_MODE", "attribute", "replaced: allowed regions are kept on a CPU"),
    Seam("vllm.utils.gpu_sync_debug._allow_depth", "attribute", "whether a read stands in an allowed region"),
    Seam(
        "vllm.utils.gpu_sync_debug.SYNC_ERROR_MESSAGE",
        "attribute",
        "its errors are known by these words",
        value="GPU<->CPU sync detected",
        device="cuda",
    ),
    Seam("vllm.utils.torch_utils", "module", "uploads"),
    Seam("vllm.v1.worker.cpu.buffer_utils.UvaBuffer", "class", "uploads of the CPU's runner", device="cpu"),
    Seam("vllm.v1.worker.cpu.buffer_utils.UvaBuffer.uva", "method", "an upload", device="cpu"),
    Seam("vllm.v1.worker.cpu_worker.CPUWorker", "class", "the worker", attributes="model_runner", device="cpu"),
    Seam(
        "vllm.v1.worker.cpu_worker.CPUWorker.execute_model",
        "method",
        "replaced: a step is watched",
        in_order="scheduler_output",
        device="cpu",
    ),
    Seam(
        "vllm.v1.worker.cpu_worker.CPUWorker.sample_tokens",
        "method",
        "replaced: sampling is watched",
        in_order="grammar_output",
        device="cpu",
    ),
    Seam("vllm.v1.worker.gpu_worker.Worker", "class", "the worker", attributes="model_runner", device="cuda"),
)
