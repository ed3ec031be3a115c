"""Staging in the engine, what needs no GPU of it: sizes, tables, both kernels' calls, graphs passed over."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.staged_layers import Rank, Sizes, build_rank, check_steps
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.fused_moe import get_config
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vamp_integration import graph_bypass, moe_kernel, plan
from vamp_integration.experts import ExpertRouting
from vamp_integration.host_reads import experts_in
from vamp_integration.placement import ExpertMemory, _views
from vamp_integration.settings import VampSettings
from vamp_integration.staged_experts import StagedExperts, unstageable
from vamp_integration.staging import Staging, staging_costs, use_staging
from vamp_integration.worker import VampWorkerMixin
from vamp_kernels.arguments import MoeArguments, check_for_kernels
from vamp_kernels.fused_moe import fused_moe_torch
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.ledger import PageLedger
from vamp_runtime.memory.slab import ExpertSlab

pytestmark = pytest.mark.vllm

CPU = torch.device("cpu")
SIZES = Sizes(layers=4, experts=6, hidden=64, intermediate=32)


@pytest.fixture
def rank() -> Iterator[Rank]:
    driver = HostDriver(4096)
    yield build_rank(driver, SIZES, CPU)
    driver.close()


def test_our_kernel_reads_what_its_step_copied(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = []

    def reference(*args: Any, workspace: Any, after_wait: bool, **named: Any) -> torch.Tensor:
        check_for_kernels(MoeArguments(*args, out=torch.empty_like(args[0]), **named))
        hosted.append(int(named["host_experts"].sum()))
        assert after_wait == (hosted[-1] == 0), "all that is out was staged, by copies that are waited for"
        return fused_moe_torch(*args)

    monkeypatch.setattr(moe_kernel, "fused_moe", reference)
    memory = rank.with_own_kernel(rank.staging("off"))
    check_steps(rank, memory, fused_moe_torch, tokens=40)
    # Off, region and auto with many tokens and with one, at four levels: what the kernel was told.
    in_host = [count for level in (1, 2, 1, 2) for count in (level, 0, 0, level, 0, level)]
    assert hosted == [count for count in in_host for _ in range(SIZES.layers)]


def test_slots_for_the_kernel_to_fill_come_and_go_in_place(rank: Rank) -> None:
    staging, geometry = rank.staging("auto"), rank.slab.geometry
    address = staging.free.data_ptr()
    assert staging.free.tolist() == list(range(geometry.own_slots, geometry.home_slot_base))
    staging.choose("off")
    assert staging.free.tolist() == [-1] * 6 and staging.free.data_ptr() == address
    assert staging.staged_from is None and not staging.needs_host_code
    assert staging.fills(24) and staging.fill(24) is None, "nothing is out"
    assert rank.boundary.offload(1).ok
    staging.update()
    assert staging.fill(24) is staging.free and staging.fill(23) is None
    assert rank.boundary.restore(1).ok
    staging.update()
    assert staging.fill(24) is None


def test_only_region_with_something_out_needs_host_code(rank: Rank) -> None:
    staging = rank.staging("region")
    assert not staging.needs_host_code and not staging.wanted(1)
    assert rank.boundary.offload(2).ok
    staging.update()
    assert staging.needs_host_code and staging.wanted(1)
    staging.choose("auto")
    assert not staging.needs_host_code and staging.wanted(1024) and not staging.wanted(1)
    # Counters that never saw a token at the experts that are out: nothing would be read.
    out = [
        {expert for group in rank.slab.out(layer) for expert in rank.slab.experts_of(layer, group)}
        for layer in range(SIZES.layers)
    ]
    staging.learn([[0 if expert in gone else 9 for expert in range(SIZES.experts)] for gone in out])
    assert staging.staged_from is None


def test_experts_beyond_the_buffer_are_read_at_their_homes(rank: Rank) -> None:
    geometry = SlabGeometry.plan(1, SIZES.experts, (12288,), 4096, 0.5, staging_records=2)
    slab = ExpertSlab(rank.driver, PageLedger(geometry.page_bytes), geometry)
    slab.refresh_homes(1 << 30)
    for group in slab.ready(0, 3):
        slab.redirect(0, group)
    staging = Staging(slab, rank.driver, CPU, "region", rank.staging("off")._costs, 1024)
    assert staging.wanted(1) and staging.needs_host_code
    assert sorted(staging.slots[0].tolist()) == [0, 1, 2, 6, 9, 10]
    assert int(staging.hosted.sum()) == 2


class _VllmKernel:
    """Takes what vLLM's modular kernel is called with, and computes it from the weights it is given."""

    def __init__(self) -> None:
        quant_config = SimpleNamespace(config_name=lambda dtype: None)
        self.fused_experts = SimpleNamespace(quant_config=quant_config)
        self.configs: list[Any] = []

    def apply(self, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, **_: Any) -> Any:
        self.configs.append(get_config())
        slots = torch.arange(w1.shape[0], dtype=torch.int32)
        return fused_moe_torch(hidden_states, w1, w2, topk_weights, topk_ids, slots)


@pytest.mark.parametrize("mode", ["region", "auto"])
def test_vllms_kernel_reads_what_its_step_copied(rank: Rank, mode: str) -> None:
    staging, kernel = rank.staging(mode, by_record=True), _VllmKernel()
    assert rank.boundary.offload(3).ok
    staging.update()
    hits = torch.zeros(1 + SIZES.experts, dtype=torch.int64)
    records = torch.tensor([rank.slab.record(0, expert) for expert in range(SIZES.experts)])
    routing, views = ExpertRouting(hits, records), rank.slab.geometry.home_slot_base
    rank.poison()
    x, weights, ids = rank.step(40)
    for index, (layer, (w13, w2)) in enumerate(zip(rank.layers, rank.weights, strict=True)):
        layer.quant_method = SimpleNamespace(moe_kernel=kernel)
        layer.activation = layer.global_num_experts = layer.expert_map = None
        staged = StagedExperts(staging, index, *_views(rank.slab, index, layer, views))
        assert staged.wanted(x)
        slots = routing(ids, staged.slots)
        assert slots.dtype == ids.dtype and bool(((slots < 0) == (ids < 0)).all())
        found = staged.forward(layer, x, weights, slots)
        assert torch.equal(found, fused_moe_torch(x, w13, w2, weights, ids))
    assert rank.staged() == 6 and hits[1:].sum() == SIZES.layers * int((ids >= 0).sum())
    assert all(config and config["BLOCK_SIZE_M"] for config in kernel.configs) and get_config() is None


def test_what_vllms_kernel_cannot_be_given() -> None:
    layer = SimpleNamespace(w13_weight=torch.empty(1, dtype=torch.bfloat16))
    assert unstageable(layer, 512, 480) == ""
    assert "over 992" in unstageable(layer, 512, 512)
    layer.w13_weight = torch.empty(1, dtype=torch.float8_e4m3fn)
    assert "scales" in unstageable(layer, 64, 8)


def test_without_slots_there_is_nothing_to_switch_to(rank: Rank) -> None:
    worker = SimpleNamespace(_memory=SimpleNamespace(staging=None))
    use_staging(worker, "off")
    with pytest.raises(ConfigError, match="staging: region has no HBM to stage to; start with staging=auto"):
        use_staging(worker, "region")
    worker._memory.staging = rank.staging("auto")
    with pytest.raises(ConfigError, match=r"staging: 'all' is none of .*; try 'auto'"):
        use_staging(worker, "all")
    assert worker._memory.staging.mode == "auto"


def test_steps_pass_graphs_over_while_they_must() -> None:
    graph = BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens=8, num_reqs=8, uniform_token_count=1)
    manager, eager = SimpleNamespace(dispatch=lambda *args, **named: graph), True
    graph_bypass.install(manager, lambda: eager)
    found = manager.dispatch(5, 5, 1, num_active_loras=0, max_query_len=1)
    assert found == BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=5, num_reqs=5)
    eager = False
    assert manager.dispatch(5, 5, 1, num_active_loras=0) is graph


QWEN = {"layers": 24, "experts": 512, "part_bytes": (6 << 20,), "device": "cuda"}


def test_staging_is_two_buffers_within_its_size() -> None:
    geometry = plan.slab_geometry(VampSettings(), **QWEN)
    assert geometry.staging_records == 84 and geometry.extra_hbm_bytes == 504 << 20
    small = plan.slab_geometry(VampSettings(max_offload_ratio=0.05), **QWEN)
    assert small.staging_records == 2 * 25
    four = plan.slab_geometry(VampSettings(), **QWEN | {"part_bytes": (3 << 19,)})
    assert four.staging_records == 2 * 128 and four.group == 4
    for none in (VampSettings(staging="off"), VampSettings(staging_mib=0)):
        assert plan.slab_geometry(none, **QWEN).staging_records == 0
    assert plan.slab_geometry(VampSettings(), **QWEN | {"device": "cpu"}).staging_records == 0


def test_staging_takes_a_quarter_of_a_small_budget_at_most() -> None:
    for kv_bytes, most in ((None, 512), (8 << 30, 512), (96 << 20, 24), (1 << 20, 0)):
        assert plan.within_budget(VampSettings(), kv_bytes).staging_mib == most
    region = VampSettings(staging="region")
    assert plan.within_budget(region, 96 << 20) is region


def test_the_papers_staging_needs_room_for_the_region() -> None:
    with pytest.raises(ConfigError, match=r"staging_mib: 512 holds 42 experts twice, .* 128; use 1536, or"):
        plan.slab_geometry(VampSettings(staging="region"), **QWEN)
    geometry = plan.slab_geometry(VampSettings(staging="region", staging_mib=1536), **QWEN)
    assert geometry.staging_records == 256


class _Engine:
    """vLLM's worker, of which only the model and the figure for the KV cache count."""

    def load_model(self) -> None:
        pass

    def determine_available_memory(self) -> int:
        return 8 << 30


class _Worker(VampWorkerMixin, _Engine):  # type: ignore[misc]
    pass


def test_a_worker_reports_what_it_has_staged_and_what_else_was_read(rank: Rank) -> None:
    worker, staging, experts = _Worker(), rank.staging("region"), SIZES.experts
    memory = ExpertMemory(rank.driver, rank.slab.ledger, rank.slab, torch.zeros(1), None, staging)
    worker.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(vamp_memory=memory))
    load = SimpleNamespace(load_format="vamp")
    worker.vllm_config = SimpleNamespace(load_config=load, additional_config={}, kv_transfer_config=None)
    worker.load_model()
    assert rank.boundary.offload(2).ok
    staging.update()
    for layer in range(SIZES.layers):
        assert staging.wanted(30)
        with staging.ahead(layer, 30):
            pass
    hosted, hits = experts_in(rank.slab, Tier.HOST), [[10] * experts] * SIZES.layers
    worker._host_reads.look(None, 9, hosted)
    worker._host_reads.look(hits, 1, hosted)
    figures = worker._figures()
    assert figures.staged_bytes == 2 * SIZES.layers * SIZES.expert_bytes
    assert figures.host_bytes_read == 0, "all 60 hits of a layer are those of the staged step"


@pytest.mark.parametrize(("budget", "taken"), [(8 << 30, 504 << 20), (None, 0)])
def test_a_budget_loses_staging_and_free_memory_has_lost_it_already(budget: int | None, taken: int) -> None:
    worker = _Worker()
    geometry = plan.slab_geometry(VampSettings(), **QWEN)
    worker._memory = SimpleNamespace(slab=SimpleNamespace(geometry=geometry))  # type: ignore[assignment]
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=budget)
    load = SimpleNamespace(load_format="vamp")
    worker.vllm_config = SimpleNamespace(load_config=load, additional_config={}, kv_transfer_config=None)
    reserve = geometry.pages_per_level * geometry.page_bytes
    assert worker.determine_available_memory() == (8 << 30) // (6 << 20) * (6 << 20) - taken - reserve


def test_staging_comes_out_of_the_kv_budget() -> None:
    settings = VampSettings()
    geometry = plan.slab_geometry(settings, **QWEN)
    assert plan.staging_share(settings, geometry, 8 << 30) == 504 << 20
    with pytest.raises(ConfigError, match=r"staging_mib: 512 takes \d+ of the \d+ bytes .*; use 256, or"):
        plan.staging_share(settings, geometry, 512 << 20)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("staging", "region", "region needs a GPU; use auto"), ("nvtx", True, "true needs a GPU; use false")],
)
def test_a_cpu_engine_is_told(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: {message}"):
        plan.check_plan(VampSettings(model="tiny-qwen3-next", **{name: value}), {}, 1, None)


def test_costs_are_those_of_the_profiles() -> None:
    layer = SimpleNamespace(
        local_num_experts=512,
        moe_config=SimpleNamespace(experts_per_token=10),
        w13_weight=torch.empty(1, dtype=torch.bfloat16),
    )
    config = SimpleNamespace(
        hidden_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=24,
        num_experts=512,
        num_experts_per_tok=10,
    )
    costs = staging_costs(VampSettings(moe_kernel="vllm"), config, layer, 6 << 20)
    assert (costs.top_k, costs.weight_bytes, costs.rows_per_read) == (10, 2, 64)
    assert costs.copy_rate > costs.read_rate > 4e10 and costs.token_s * 24 * 80_000 == pytest.approx(
        1, rel=0.2
    )
    assert staging_costs(VampSettings(moe_kernel="vamp"), config, layer, 6 << 20).rows_per_read == 0
