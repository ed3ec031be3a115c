"""KV offloading to host for the CPU engine, where vLLM has none: its own scheduler's half and host cache, and
copies that are made as late as they may, so that one from memory that is gone ends the process."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

Copies = list[tuple[torch.Tensor, torch.Tensor]]


class LateSpec(CPUOffloadingSpec):
    """``CPUOffloadingSpec`` whose worker copies within host memory, after ``late_polls`` looks."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.late_polls = int(self.extra_config.get("late_polls", 4))

    def get_worker(self, kv_caches: CanonicalKVCaches) -> LateWorker:
        return LateWorker(kv_caches, self.num_chunks, self.late_polls)


class LateWorker(OffloadingWorker):
    """Copies a job when it has been asked for it ``late_polls`` times, or is told to wait for it.

    Attributes:
        copied: blocks copied, by direction.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int, late_polls: int) -> None:
        self._caches = kv_caches
        self._host = [torch.zeros(chunks, t.page_size_bytes, dtype=torch.int8) for t in kv_caches.tensors]
        self._late_polls = late_polls
        self._jobs: dict[int, tuple[int, Copies]] = {}
        self._done: list[int] = []
        self.copied = {"store": 0, "load": 0}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, src_spec, dst_spec, "store")

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, dst_spec, src_spec, "load")

    def get_finished(self) -> list[TransferResult]:
        for job_id, (polls, copies) in list(self._jobs.items()):
            if polls >= self._late_polls:
                self._copy(job_id)
            else:
                self._jobs[job_id] = polls + 1, copies
        done, self._done = self._done, []
        return [TransferResult(job_id, success=True) for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._copy(job_id)

    def _submit(self, job_id: int, device: GPULoadStoreSpec, host: Any, way: str) -> bool:
        groups = [g for g, size in enumerate(device.group_sizes) for _ in range(size)]
        copies: Copies = []
        for group, block, chunk in zip(groups, device.block_ids, host.block_ids, strict=True):
            for ref in self._caches.group_data_refs[group]:
                here = self._caches.tensors[ref.tensor_idx].tensor[int(block), : ref.page_size_bytes]
                there = self._host[ref.tensor_idx][int(chunk), : ref.page_size_bytes]
                copies.append((there, here) if way == "store" else (here, there))
        self._jobs[job_id] = 0, copies
        self.copied[way] += len(groups)
        return True

    def _copy(self, job_id: int) -> None:
        for to, source in self._jobs.pop(job_id)[1]:
            to.copy_(source)
        self._done.append(job_id)
