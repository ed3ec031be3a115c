"""The CPU engine's worker with VAMP. A step ends before the next begins, so moves need no fence."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vamp_integration import kv_memory
from vamp_integration.worker import VampWorkerMixin


class VampCPUWorker(VampWorkerMixin, CPUWorker):
    """``worker_cls`` of the CPU engine."""

    def _kv_tails(self) -> int:
        """As vLLM plans it: on a CPU, one for each layer of a group."""
        return kv_memory.tails(self.vllm_config, self.get_kv_cache_spec())
