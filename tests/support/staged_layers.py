"""MoE layers over a slab with staging, on either driver, for tests of what a staged step reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from vamp_integration.moe_kernel import SlotTables
from vamp_integration.placement import ExpertMemory, _own_kernel, _store, _views
from vamp_integration.staging import Staging
from vamp_runtime.memory.agreement import SoleRank
from vamp_runtime.memory.boundary import Boundary
from vamp_runtime.memory.driver import MemoryDriver
from vamp_runtime.memory.geometry import KVGeometry, SlabGeometry
from vamp_runtime.memory.kv_region import KVRegion
from vamp_runtime.memory.ledger import PageLedger
from vamp_runtime.memory.slab import ExpertSlab
from vamp_runtime.policy.staging import StagingCosts

TOP_K = 2


@dataclass(frozen=True)
class Sizes:
    """Half of the experts may leave, and staging holds as many twice."""

    layers: int
    experts: int
    hidden: int
    intermediate: int

    @property
    def expert_bytes(self) -> int:
        return 6 * self.hidden * self.intermediate


@dataclass
class Rank:
    """Layers of experts in interleaved records, and the same weights in plain tensors."""

    sizes: Sizes
    driver: MemoryDriver
    slab: ExpertSlab
    boundary: Boundary
    layers: list[Any]
    weights: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def device(self) -> torch.device:
        return self.weights[0][0].device

    def staging(self, mode: str, by_record: bool = False) -> Staging:
        """Costs of links so slow and layers so long that ``auto`` stages all but the smallest steps ahead."""
        costs = StagingCosts(
            experts=self.sizes.experts,
            top_k=TOP_K,
            expert_bytes=self.sizes.expert_bytes,
            weight_bytes=2,
            hbm_rate=1e15,
            read_rate=self.sizes.expert_bytes / 0.012,
            copy_rate=self.sizes.expert_bytes / 0.01,
            compute_rate=1e18,
            token_s=1e-3,
        )
        return Staging(self.slab, self.driver, self.device, mode, costs, 1024, by_record)

    def with_own_kernel(self, staging: Staging) -> ExpertMemory:
        """Every layer's ``slot_kernel``; what has to follow the slab."""
        hits = torch.zeros(self.sizes.layers, self.sizes.experts, dtype=torch.int64, device=self.device)
        tables: SlotTables = _own_kernel(self.slab, self.layers, hits, staging)
        return ExpertMemory(self.driver, self.slab.ledger, self.slab, hits, tables, staging)

    def staging_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``w13`` and ``w2`` of the staging slots, which are those of every layer."""
        geometry = self.slab.geometry
        w13, w2 = _views(self.slab, 0, self.layers[0], geometry.home_slot_base)
        return w13[geometry.own_slots :], w2[geometry.own_slots :]

    def poison(self) -> None:
        """NaN in every staging slot: what a step reads there, it must have copied."""
        for view in self.staging_slots():
            view.fill_(math.nan)

    def staged(self) -> int:
        """Staging slots that something was copied to since ``poison``."""
        return sum(not bool(slot.isnan().any()) for slot in self.staging_slots()[0])

    def step(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x``, router weights and ids of a step, one of them padding."""
        ids = torch.rand(tokens, self.sizes.experts, device=self.device).topk(TOP_K).indices.int()
        ids[0, 0] = -1
        x = torch.randn(tokens, self.sizes.hidden, device=self.device).bfloat16()
        return x, torch.rand(tokens, TOP_K, device=self.device), ids


def build_rank(driver: MemoryDriver, sizes: Sizes, device: torch.device) -> Rank:
    granularity, staging = driver.granularity, 2 * (sizes.experts // 2)
    parts = (sizes.expert_bytes,)
    geometry = SlabGeometry.plan(sizes.layers, sizes.experts, parts, granularity, 0.5, staging)
    ledger = PageLedger(geometry.page_bytes)
    order = [torch.randperm(sizes.experts).tolist() for _ in range(sizes.layers)]
    slab = ExpertSlab(driver, ledger, geometry, order)
    layers, weights = [], []
    for index in range(sizes.layers):
        w13 = torch.randn(sizes.experts, 2 * sizes.intermediate, sizes.hidden, device=device)
        w2 = torch.randn(sizes.experts, sizes.hidden, sizes.intermediate, device=device)
        plain = tuple((weight * weight.shape[2] ** -0.5).bfloat16() for weight in (w13, w2))
        layer: Any = SimpleNamespace(w13_weight=nn.Parameter(plain[0]), w2_weight=nn.Parameter(plain[1]))
        layer.apply_router_weight_on_input = False
        layer.moe_config = SimpleNamespace(in_dtype=torch.bfloat16, experts_per_token=TOP_K)
        places = torch.tensor(order[index], device=device)
        for weight, view in zip(plain, _views(slab, index, layer, sizes.experts), strict=True):
            _store(weight, view, places)
        layers.append(layer)
        weights.append(plain)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the driver's copies wait for none of torch's
    slab.refresh_homes(1 << 60)
    page = geometry.page_bytes
    kv_pages = 4 + geometry.max_level * geometry.pages_per_level
    region = KVRegion(driver, ledger, KVGeometry(1, page, kv_pages * page, kv_pages, page), pages=2)
    return Rank(sizes, driver, slab, Boundary(slab, region, SoleRank(), driver), layers, weights)


def check_steps(rank: Rank, memory: ExpertMemory, expected: Callable[..., torch.Tensor], tokens: int) -> None:
    """Steps of ``tokens`` and of one token in every mode, after moves either way, staging poisoned between.

    Args:
        expected: ``(x, w13, w2, router weights, ids)`` to what a layer must return, bit for bit.
    """
    staging, group = memory.staging, rank.slab.geometry.group
    assert staging is not None
    changes = [rank.boundary.offload, rank.boundary.offload, rank.boundary.restore, rank.boundary.offload]
    for level, change in zip([1, 2, 1, 2], changes, strict=True):
        assert change(1).ok
        memory.update_tables()
        both = 2 * level * group  # the largest groups that leave, in two buffers
        for mode, size, staged in [
            ("off", tokens, 0),
            ("region", tokens, both),
            ("auto", tokens, both),
            ("off", 1, 0),
            ("region", 1, both),
            ("auto", 1, 0),
        ]:
            staging.choose(mode)
            rank.poison()
            arguments = rank.step(size)
            for index, (layer, (w13, w2)) in enumerate(zip(rank.layers, rank.weights, strict=True)):
                found = layer.slot_kernel(*arguments)
                assert torch.equal(found, expected(arguments[0], w13, w2, *arguments[1:])), (
                    mode,
                    size,
                    index,
                )
            assert rank.staged() == staged, (mode, size)
            rank.boundary.check_integrity()
