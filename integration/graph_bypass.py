"""Hook: ``vllm/v1/worker/gpu/cudagraph_utils.py`` ``CudaGraphManager.dispatch``.

What: steps that no graph may serve are run without one, whatever their size. Why: the paper's staging copies
from host code before every layer, and a replayed graph runs none. How: the runner's manager is given a
``dispatch`` of its own, which asks first. All ranks answer alike, since they share mode and level. It goes
when vLLM lets a plugin choose a step's mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor


def install(manager: Any, without_graph: Callable[[], bool]) -> None:
    """Let ``manager`` dispatch steps to no graph while ``without_graph()`` holds."""
    dispatch = manager.dispatch

    def dispatch_or_not(
        num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **named: Any
    ) -> Any:
        found = dispatch(num_reqs, num_tokens, uniform_token_count, *args, **named)
        if not without_graph() or found.cg_mode == CUDAGraphMode.NONE:
            return found
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_active_loras=found.num_active_loras,
            num_ubatches=found.num_ubatches,
        )

    manager.dispatch = dispatch_or_not
