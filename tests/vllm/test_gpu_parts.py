"""Parts of the GPU engine that need no GPU: KV layout, outputs, counters, slot tables."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.rigs import RECORDS, build_rig
from torch import nn
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    MambaSpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.utils import allocate_kv_cache

from vamp_integration import engine_args, kv_memory, moe_kernel, plan
from vamp_integration.commands import Report, get_report
from vamp_integration.experts import ExpertRouting
from vamp_integration.hit_counts import HitCounts
from vamp_integration.moe_kernel import SlotTables
from vamp_integration.placement import _own_kernel, _store, _views, reorder_others
from vamp_integration.settings import VampSettings
from vamp_integration.worker import VampWorkerMixin
from vamp_integration.worker_gpu import ReportedOutput
from vamp_kernels.arguments import MoeArguments, check_for_kernels
from vamp_kernels.fused_moe import fused_moe_torch
from vamp_runtime.controller import Capacity
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.agreement import SoleRank
from vamp_runtime.memory.boundary import Boundary
from vamp_runtime.memory.geometry import KVGeometry, SlabGeometry
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.kv_region import KVRegion
from vamp_runtime.memory.ledger import PageLedger
from vamp_runtime.memory.slab import ExpertSlab

pytestmark = pytest.mark.vllm

CPU = torch.device("cpu")
CAPACITY = Report(capacity=Capacity((10, 12), experts=4, group=1, level_bytes=4096))


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(4096)
    yield driver
    driver.close()


@pytest.fixture
def planned() -> tuple[Any, KVCacheConfig]:
    """Two linear-attention groups and a full-attention one of two layers each, planned by vLLM for BLHNC."""
    attention = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    page = attention.page_size_bytes
    state = MambaSpec(
        block_size=64,
        shapes=((3, 64), (4, 8, 8)),
        dtypes=(torch.bfloat16, torch.bfloat16),
        page_size_padded=page,
        mamba_cache_mode="align",
    )
    groups = [
        KVCacheGroupSpec([f"layers.{index + offset}" for offset in (0, 4)], spec)
        for index, spec in enumerate((state, state, attention))
    ]
    cache = SimpleNamespace(
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
    )
    config = SimpleNamespace(
        cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None), model_config=None
    )
    return config, get_kv_cache_config_from_groups(config, groups, available_memory=9 * 2 * page + 100)


def test_a_block_outermost_cache_has_one_tail(planned: tuple[Any, KVCacheConfig]) -> None:
    vllm_config, config = planned
    block = config.kv_cache_tensors[0].block_stride
    assert config.num_blocks == 9 and kv_memory.layout(config) == (1, block)
    geometry = kv_memory.region_geometry(config, page_bytes=3 * 4096, max_pages=40)
    assert geometry.positions == 1 and geometry.max_pages >= 40
    virtual = kv_memory.virtual_config(vllm_config, config, geometry.virtual_blocks)
    assert config.num_blocks == 9 and vllm_config.cache_config.num_gpu_blocks_override is None
    assert virtual.num_blocks == geometry.virtual_blocks
    assert {tensor.size for tensor in virtual.kv_cache_tensors} == {geometry.nbytes}
    for before, after in zip(config.kv_cache_tensors, virtual.kv_cache_tensors, strict=True):
        assert (before.block_stride, before.layer_stride, before.offset, before.layers) == (
            after.block_stride,
            after.layer_stride,
            after.offset,
            after.layers,
        )


def test_the_cache_is_laid_into_the_buffer(planned: tuple[Any, KVCacheConfig]) -> None:
    _, config = planned
    size, block = config.kv_cache_tensors[0].size, config.kv_cache_tensors[0].block_stride
    buffer = torch.empty(size, dtype=torch.int8)
    with kv_memory.KVBuffer(buffer) as allocation:
        torch.zeros(size, dtype=torch.uint8)
        torch.zeros(size + 1, dtype=torch.int8)
        views = allocate_kv_cache(config, CPU, KVCacheLayout.BLHNC)
    assert allocation.taken == 1
    assert {view.untyped_storage().data_ptr() for view in views.values()} == {buffer.data_ptr()}
    second = views["layers.6"]
    assert second.data_ptr() - buffer.data_ptr() == block // 2
    assert second.stride(0) * second.element_size() == block


@pytest.mark.parametrize(("asynchronous", "name"), [(True, "VampAsyncScheduler"), (False, "VampScheduler")])
def test_the_scheduler_follows_the_mode(asynchronous: bool, name: str) -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=asynchronous))
    assert engine_args._scheduler(config).endswith(f".{name}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", [None, [2, 0, 3, 1]])
def test_routing_counts_and_translates(dtype: torch.dtype, order: list[int] | None) -> None:
    hits = torch.zeros(5, dtype=torch.int64)
    routing = ExpertRouting(hits, None if order is None else torch.tensor(order))
    ids = torch.tensor([[0, 3], [-1, -1], [3, 1]], dtype=dtype)
    for _ in range(2):
        records = routing(ids)
    wanted = [[-1 if e < 0 else (order[e] if order else e) for e in row] for row in ids.tolist()]
    assert records.dtype == dtype and records.tolist() == wanted
    counts = HitCounts(hits[None, 1:])
    assert counts.poll(8) == ([[2, 2, 0, 4]], 8) and counts.poll(20) == ([[2, 2, 0, 4]], 12)


def test_scales_follow_their_experts() -> None:
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(torch.zeros(3, 2))
    layer.w13_weight_scale_inv = nn.Parameter(torch.tensor([[0.0], [1.0], [2.0]]))
    layer.gate_scale = nn.Parameter(torch.tensor(5.0))
    scale = layer.w13_weight_scale_inv.data
    reorder_others(layer, 3, torch.tensor([2, 0, 1]))
    assert scale.tolist() == [[1.0], [2.0], [0.0]]


def test_slot_tables_follow_moves_in_place(driver: HostDriver) -> None:
    rig = build_rig(driver, RECORDS)
    tables = SlotTables(rig.slab, CPU)
    address = tables.slots.data_ptr()
    assert tables.slots.tolist() == rig.table and not tables.hosted.any()
    assert rig.boundary.offload(1).ok
    tables.update()
    moved = [rig.slab.experts_of(layer, rig.slab.out(layer)[0]) for layer in range(rig.geometry.layers)]
    assert tables.slots.data_ptr() == address and tables.slots.tolist() == rig.table
    assert [row.nonzero().flatten().tolist() for row in tables.hosted] == [sorted(row) for row in moved]


def test_our_kernel_is_given_the_slots_of_the_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved records, one level out: the arguments fit the kernel, and name the right bytes."""
    experts, hidden, intermediate = 6, 64, 32
    w13 = torch.randn(experts, 2 * intermediate, hidden).bfloat16()
    w2 = torch.randn(experts, hidden, intermediate).bfloat16()
    driver = HostDriver(4096)
    geometry = SlabGeometry.plan(1, experts, (w13[0].nbytes + w2[0].nbytes,), 4096, 0.5)
    ledger = PageLedger(geometry.page_bytes)
    slab = ExpertSlab(driver, ledger, geometry, [[5, 3, 1, 0, 2, 4]])
    layer: Any = SimpleNamespace(w13_weight=nn.Parameter(w13), w2_weight=nn.Parameter(w2))
    for weight, view in zip((w13, w2), _views(slab, 0, layer, experts), strict=True):
        _store(weight, view, torch.tensor([5, 3, 1, 0, 2, 4]))
    slab.refresh_homes(1 << 30)
    region = KVRegion(driver, ledger, KVGeometry(1, 4096, 64 * 12288, 192, geometry.page_bytes), pages=2)
    assert Boundary(slab, region, SoleRank(), driver).offload(2).ok
    layer.apply_router_weight_on_input, layer.moe_config = False, SimpleNamespace(in_dtype=torch.bfloat16)
    _own_kernel(slab, [layer], torch.zeros(1, experts, dtype=torch.int64))
    seen: list[dict[str, Any]] = []

    def reference(*args: Any, workspace: Any, after_wait: bool, **named: Any) -> torch.Tensor:
        arguments = MoeArguments(*args, out=torch.empty_like(args[0]), **named)
        check_for_kernels(arguments)
        seen.append(named)
        return fused_moe_torch(*args)

    monkeypatch.setattr(moe_kernel, "fused_moe", reference)
    x, weights = torch.randn(5, hidden).bfloat16(), torch.rand(5, 2)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [-1, -1], [5, 0]], dtype=torch.int32)
    found = layer.slot_kernel(x, weights, ids)
    assert torch.equal(found, fused_moe_torch(x, w13, w2, weights, ids))
    assert int(seen[0]["host_experts"].sum()) == 2 * geometry.group
    layer.slot_kernel.warm_up(9, 2)
    assert len(seen) == 1 + 4
    driver.close()


class _Later(AsyncModelRunnerOutput):
    def get_output(self) -> ModelRunnerOutput:
        return EMPTY_MODEL_RUNNER_OUTPUT


def test_a_report_travels_on_an_output_that_comes_later() -> None:
    output = ReportedOutput(_Later(), CAPACITY).get_output()
    assert get_report(output) is CAPACITY and get_report(EMPTY_MODEL_RUNNER_OUTPUT) is None


class _Engine:
    """As vLLM's worker does, the warm-up takes steps through ``execute_model``."""

    def compile_or_warm_up_model(self) -> str:
        self.warm_up_output = self.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
        return "times"

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput:
        return ModelRunnerOutput([], {})


class _Worker(VampWorkerMixin, _Engine):  # type: ignore[misc]
    pass


def test_the_warm_up_takes_no_report_away() -> None:
    worker = _Worker()
    worker._capacity_report = CAPACITY
    worker._memory = SimpleNamespace(hits=torch.ones(1, 2))  # type: ignore[assignment]
    worker._mover = SimpleNamespace(  # type: ignore[assignment]
        busy=False, finish=lambda wait: None, cover=lambda: None
    )
    assert worker.compile_or_warm_up_model() == "times"
    assert get_report(worker.warm_up_output) is None and not worker._memory.hits.any()
    step = SimpleNamespace(total_num_scheduled_tokens=1)
    assert get_report(worker.execute_model(step)) is CAPACITY
    assert get_report(worker.execute_model(step)) is None


def test_our_kernel_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="moe_kernel: vamp needs a GPU; use vllm"):
        plan.check_plan(VampSettings(moe_kernel="vamp", model="tiny-qwen3-next"), {}, 1, None)
