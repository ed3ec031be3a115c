"""The CPU engine's worker with VAMP. A step ends before the next begins, so moves need no fence."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vamp_integration.worker import VampWorkerMixin


class VampCPUWorker(VampWorkerMixin, CPUWorker):
    """``worker_cls`` of the CPU engine."""
