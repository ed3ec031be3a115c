"""What the process that scenarios are forked from has imported. Starts no thread and touches no device."""

import vllm.engine.arg_utils
import vllm.model_executor.models.qwen3_next
import vllm.v1.engine.llm_engine
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

# vLLM inspects a model that it sees for the first time in a process of its own, which imports vLLM anew.
registry._run_in_subprocess = lambda inspect: inspect()

if current_platform.is_cpu():
    import vllm.v1.worker.cpu_worker  # noqa: F401
