"""What the process that scenarios are forked from has imported. Starts no thread and touches no device."""

import gc

import vllm.engine.arg_utils
import vllm.model_executor.models.qwen3_next
import vllm.v1.engine.llm_engine
from vllm.platforms import current_platform

if current_platform.is_cpu():
    import vllm.v1.worker.cpu_worker  # noqa: F401

# An engine collects garbage several times while it starts; what was imported is none, and is not searched.
gc.collect()
gc.freeze()
