"""VAMP's workers on a CPU: slab, KV region, mover and driver are real, vLLM's worker is a stand-in."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vamp_integration import worker
from vamp_integration.experts import VampRoutedExperts
from vamp_integration.moe_kernel import SlotTables
from vamp_integration.placement import ExpertMemory
from vamp_integration.worker import VampWorkerMixin
from vamp_integration.worker_cpu import VampCPUWorker
from vamp_integration.worker_gpu import VampGPUWorker
from vamp_runtime.memory.agreement import SoleRank
from vamp_runtime.memory.driver import MemoryDriver
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.ledger import PageLedger
from vamp_runtime.memory.slab import ExpertSlab

CPU = torch.device("cpu")
MAX_TOKENS, TOP_K = 64, 2
WIDTH = 8  # blocks of a row of the gathered block tables


def small_slab(driver: MemoryDriver, staging_records: int = 0, ratio: float = 0.5) -> ExpertMemory:
    """Two layers of 8 experts, two to a group of one page of 12 KiB; half of them may leave.

    Filled with random bytes, of which every expert that may leave has a copy in its home.
    """
    geometry = SlabGeometry.plan(2, 8, (6144,), driver.granularity, ratio, staging_records)
    ledger = PageLedger(geometry.page_bytes)
    slab = ExpertSlab(driver, ledger, geometry, mirror=False)
    draw = random.Random(5)
    for layer in range(geometry.layers):
        for expert in range(geometry.experts):
            driver.write(slab.address(layer, 0, expert), draw.randbytes(geometry.expert_bytes))
    slab.seal()
    slab.refresh_homes(1 << 30)
    hits = torch.zeros(geometry.layers, geometry.experts, dtype=torch.int64)
    return ExpertMemory(driver, ledger, slab, hits, SlotTables(slab, CPU))


def kv_groups(layers: int = 2) -> list[KVCacheGroupSpec]:
    """Linear attention in two groups and full attention in one, of ``layers`` layers of 1,536 bytes each."""
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
    state = MambaSpec(
        block_size=16,
        shapes=((3, 64), (2, 8, 8)),
        dtypes=(torch.bfloat16, torch.bfloat16),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    return [
        KVCacheGroupSpec([f"layers.{index + 3 * offset}" for offset in range(layers)], spec)
        for index, spec in enumerate((state, state, attention))
    ]


def engine_config(
    vamp: dict[str, Any], kv_bytes: int | None, layout: KVCacheLayout = KVCacheLayout.BLHNC
) -> Any:
    """As much of vLLM's configuration as VAMP's worker and vLLM's planner of the KV cache read."""
    cache = SimpleNamespace(
        num_gpu_blocks=None,
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=kv_bytes,
        prefix_cache_retention_interval=None,
        get_resolved_kv_cache_layout=lambda: layout,
    )
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format="vamp"),
        additional_config={"vamp": {"moe_kernel": "vamp", **vamp}},
        kv_transfer_config=None,
        cache_config=cache,
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=None,
        speculative_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=MAX_TOKENS, disable_hybrid_kv_cache_manager=False
        ),
    )


class Model(nn.Module):
    """One layer with VAMP's kernel, whose warm-up says that it ran."""

    def __init__(self, memory: ExpertMemory, events: list[str]) -> None:
        super().__init__()
        layer = object.__new__(VampRoutedExperts)
        nn.Module.__init__(layer)
        layer.moe_config = SimpleNamespace(experts_per_token=TOP_K)
        layer.slot_kernel = SimpleNamespace(  # type: ignore[assignment]
            warm_up=lambda tokens, top_k: events.append(f"own kernel up to {tokens} tokens, top {top_k}")
        )
        self.layer, self.vamp_memory = layer, memory


class StandIn:
    """What lies below VAMP's mixin in the place of vLLM's worker: sizes and calls, no model.

    Attributes:
        events: what was called, in order.
        available: bytes that profiling finds.
        plan: bytes that an earlier start has found, which vLLM takes in the place of profiling.
    """

    plan: int | None = None

    def __init__(
        self, memory: ExpertMemory, config: Any, groups: Sequence[KVCacheGroupSpec], available: int = 0
    ) -> None:
        self.vllm_config, self.cache_config = config, config.cache_config
        self.parallel_config, self.scheduler_config = config.parallel_config, config.scheduler_config
        self.groups = groups
        self.events: list[str] = []
        self.available = available
        tables = [torch.zeros(4, WIDTH, dtype=torch.int32) for _ in groups]
        model = Model(memory, self.events)
        self.model_runner: Any = SimpleNamespace(
            get_model=lambda: model,
            block_tables=SimpleNamespace(input_block_tables=tables),
            cudagraph_manager=None,
        )

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.events.append("load")

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {name: group.kv_cache_spec for group in self.groups for name in group.layer_names}

    def determine_available_memory(self) -> int:
        self.events.append("profile, with graphs captured")
        if self.plan is None:
            return self.available
        self.cache_config.kv_cache_memory_bytes = self.plan
        return self.plan

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        self.model_runner.kv_cache_config = copy.deepcopy(kv_cache_config)
        with self._maybe_get_memory_pool_context("kv_cache"):  # type: ignore[attr-defined]
            torch.zeros(kv_cache_config.kv_cache_tensors[0].size, dtype=torch.int8)

    def compile_or_warm_up_model(self) -> Any:
        self.events.append("warm up, capture")
        return "times"

    def execute_model(self, scheduler_output: Any) -> Any:
        return EMPTY_MODEL_RUNNER_OUTPUT


class _VllmGPUWorker(StandIn, Worker):
    pass


class _VllmCPUWorker(StandIn, CPUWorker):
    pass


class GPUEngineWorker(VampGPUWorker, _VllmGPUWorker):
    """The GPU engine's over the stand-in, since that is a subclass of vLLM's."""


class CPUEngineWorker(VampCPUWorker, _VllmCPUWorker):
    """The CPU engine's, likewise."""


def start(rank: VampWorkerMixin) -> KVCacheConfig:
    """Up to the KV cache, as vLLM's engine core does; the configuration that it and the scheduler share."""
    assert isinstance(rank, StandIn)
    alone, worker.make_agreement = worker.make_agreement, SoleRank
    try:
        rank.load_model()
        available = rank.determine_available_memory()
        groups = get_kv_cache_groups(rank.vllm_config, rank.get_kv_cache_spec())
        config = get_kv_cache_config_from_groups(rank.vllm_config, groups, available)
        rank.initialize_from_config(config)
    finally:
        worker.make_agreement = alone
    return config
