"""Which steps read host-backed experts from staging slots, and through which tables.

A large step touches every expert of a layer. Bringing them ahead of the layer, while attention and the layer
before run, hides the link better than reading them when their turn comes; a small step touches few of them
and reads those in place. ``auto`` chooses by the step's tokens, from measured rates and use; ``region`` is
the paper's, the whole offloaded region before every layer of every step; ``off`` reads in place only.

Copies ahead are made by the copy engine, from host code, of which a replayed graph has none: steps that
graphs serve read in place, and while ``region`` has something to copy, no graph is replayed
(``graph_bypass.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vamp_integration.costs import engine_costs
from vamp_integration.host_reads import StagedAhead, experts_in
from vamp_integration.plan import hardware_profile
from vamp_integration.settings import STAGING_MODES, VampSettings
from vamp_kernels.ranges import ranged
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.copy_times import StagingSeconds
from vamp_runtime.memory.driver import MemoryDriver, Tier
from vamp_runtime.memory.region import RegionCopies, StagedRegion, buffer_groups, plan_region
from vamp_runtime.memory.slab import ExpertSlab
from vamp_runtime.policy.staging import StagingCosts, staged_from, use_of

# Rows of a tile of vLLM's kernel in large steps: it reads an expert once for each.
VLLM_TILE_ROWS = 64
# Tokens of an average expert below which VAMP's kernel is given no slots to fill itself: experts out of HBM
# are those with the fewest, which a tile of 16 holds, and launches that could stage cost every small step.
FILL_ROWS = 8


class Staging:
    """Staging of one rank. Tables change in place, between steps.

    Args:
        costs: of one layer, for ``auto``.
        max_tokens: of a step.
        by_record: the kernel reads what is not staged at its own record, as vLLM's, not through home aliases.

    Attributes:
        mode: one of ``STAGING_MODES``.
        slots: int32 ``[layers, experts]``, where a step that is staged ahead reads each expert.
        hosted: bool ``[layers, experts]``, whether that lies in host memory all the same.
        free: int32 ``[staging records]``, slots that VAMP's kernel may bring experts to itself in a step that
            is not staged ahead; -1 where there are none, as with ``off``.
    """

    def __init__(
        self,
        slab: ExpertSlab,
        driver: MemoryDriver,
        device: torch.device,
        mode: str,
        costs: StagingCosts,
        max_tokens: int,
        by_record: bool = False,
    ) -> None:
        geometry = slab.geometry
        self._slab = slab
        self._costs = costs
        self._max_tokens = max_tokens
        self._by_record = by_record
        self._copies = RegionCopies(slab, driver, device)
        self._use: float = costs.top_k / costs.experts
        self._out = self._staged = 0
        self._from: int | None = None
        self._stale = True
        self._ahead = StagedAhead()
        self._left: Sequence[set[int]] = ()
        self.mode = mode
        shape = (geometry.layers, geometry.experts)
        self.slots = torch.empty(shape, dtype=torch.int32, device=device)
        self.hosted = torch.empty(shape, dtype=torch.bool, device=device)
        self.free = torch.empty(geometry.staging_records, dtype=torch.int32, device=device)
        self.choose(mode)

    @property
    def staged_from(self) -> int | None:
        """Fewest tokens of a step that is staged ahead; None where no step is."""
        return self._from

    @property
    def seconds(self) -> StagingSeconds:
        """Time of the copies ahead of layers since start."""
        return self._copies.seconds

    @property
    def nbytes(self) -> int:
        """Bytes copied ahead of layers since start."""
        return self._copies.nbytes

    def so_far(self) -> StagedAhead:
        """What steps were staged ahead since start."""
        return self._ahead

    @property
    def needs_host_code(self) -> bool:
        """Whether every step copies ahead, so that none may be a graph's replay."""
        return self._from == 0

    def choose(self, mode: str) -> None:
        """Stage by ``mode`` from the next step on.

        Raises:
            ConfigError: there is no such mode, or no slot to stage to.
        """
        if mode not in STAGING_MODES:
            raise ConfigError(f"staging: {mode!r} is none of {STAGING_MODES}; try 'auto'")
        if mode == "region" and not buffer_groups(self._slab):
            raise ConfigError("staging: region has no HBM to stage to; start with staging_mib=512")
        self.mode = mode
        geometry = self._slab.geometry
        if mode == "off":
            self.free.fill_(-1)
        else:
            first, end = geometry.own_slots, geometry.home_slot_base
            self.free.copy_(torch.arange(first, end, dtype=torch.int32))
        self.update()

    def update(self) -> None:
        """Follow the slab's slot table, from the next step on. Cheap: it lies on the path of a move."""
        slab = self._slab
        hosted = max(len(slab.hosted(layer)) for layer in range(slab.geometry.layers))
        self._out = hosted * slab.geometry.group
        self._staged = min(hosted, buffer_groups(slab)) * slab.geometry.group
        self._stale = True
        self._decide()

    def learn(self, hits: Sequence[Sequence[int]]) -> None:
        """Take over the use of the experts read in host memory from the counters, ``[layers][experts]``."""
        self._use = use_of(hits, experts_in(self._slab, Tier.HOST), self._costs.top_k, self._costs.experts)
        self._decide()

    def fill(self, tokens: int) -> torch.Tensor | None:
        """``free`` for a step, of so many tokens, that is not staged ahead; None where it is not worth it.

        Nor is it while nothing is on the host, but for a graph, which is replayed at other levels.
        """
        return self.free if self.fills(tokens) and (self._out or self._captured()) else None

    def fills(self, tokens: int) -> bool:
        """Whether such a step may bring experts to slots itself, once some are on the host."""
        return tokens * self._costs.top_k >= FILL_ROWS * self._costs.experts

    def wanted(self, tokens: int) -> bool:
        """Whether the layers of this step, of so many tokens, are staged ahead; then the tables are right."""
        if self._from is None or tokens < self._from or self._captured():
            return False
        if self._stale:
            self._rebuild()
        return True

    @contextmanager
    def ahead(self, layer: int, tokens: int) -> Iterator[None]:
        """Inside, the layer's staged experts can be read; the next layers' copies go on.

        ``tokens`` are those of the step.
        """
        if layer == 0:
            steps, hits = self._ahead.steps + 1, self._ahead.hits + tokens * self._costs.top_k
            self._ahead = StagedAhead(steps, hits, self._left)
        self._enter(layer)
        yield
        self._leave(layer)

    @ranged("staging")
    def _enter(self, layer: int) -> None:
        self._copies.enter(layer)

    @ranged("staging")
    def _leave(self, layer: int) -> None:
        self._copies.leave(layer)

    def _captured(self) -> bool:
        return self.free.is_cuda and torch.cuda.is_current_stream_capturing()

    def _rebuild(self) -> None:
        """Bring tables and copies up to date, for what is queued on the current stream from now on."""
        slab = self._slab
        layers, experts = range(slab.geometry.layers), range(slab.geometry.experts)
        regions = [plan_region(slab, layer) for layer in layers]
        rows: Sequence[Sequence[int]] = slab.slot_table
        if self._by_record:
            rows = [[slab.record(layer, expert) for expert in experts] for layer in layers]
        merged = [
            [region.slots.get(expert, row[expert]) for expert in experts]
            for row, region in zip(rows, regions, strict=True)
        ]
        slots = torch.tensor(merged, dtype=torch.int32)
        self.slots.copy_(slots)
        self.hosted.copy_(slots >= slab.geometry.host_slot_base)
        self._copies.follow([region.copies for region in regions])
        self._left = _left_in_place(slab, regions)
        self._stale = False

    def _decide(self) -> None:
        self._from = None
        if self.mode == "region" and self._staged:
            self._from = 0
        elif self.mode == "auto":
            self._from = staged_from(self._costs, self._out, self._staged, self._use, self._max_tokens)


def _left_in_place(slab: ExpertSlab, regions: Sequence[StagedRegion]) -> list[set[int]]:
    """Per layer, the experts on the host for which the buffers have no room; empty where all have."""
    if not any(region.left for region in regions):
        return []
    on_host = experts_in(slab, Tier.HOST)
    return [set(experts).difference(region.slots) for experts, region in zip(on_host, regions, strict=True)]


def staging_costs(settings: VampSettings, hf_config: Any, layer: Any, expert_bytes: int) -> StagingCosts:
    """What a layer costs, by the hardware and model profiles of ``settings``.

    Args:
        layer: vLLM's ``RoutedExperts``.
        expert_bytes: of one expert on this rank.
    """
    hardware = hardware_profile(settings, "cuda")
    prefill_s = engine_costs(settings, hf_config, on_cpu=False).parameters.t_prefill_s
    return StagingCosts(
        experts=layer.local_num_experts,
        top_k=layer.moe_config.experts_per_token,
        expert_bytes=expert_bytes,
        weight_bytes=layer.w13_weight.element_size(),
        hbm_rate=hardware.hbm_bandwidth.value,
        read_rate=hardware.host_read_bandwidth.value,
        copy_rate=hardware.host_to_device_bandwidth.value,
        compute_rate=hardware.compute.value if hardware.compute is not None else float("inf"),
        token_s=prefill_s / hf_config.num_hidden_layers,
        rows_per_read=VLLM_TILE_ROWS if settings.moe_kernel == "vllm" else 0,
    )


def use_staging(worker: Any, mode: str) -> None:
    """For ``collective_rpc``, between two steps: stage by ``mode`` from now on."""
    staging = worker._memory.staging
    if staging is None:
        if mode != "off":
            raise ConfigError(f"staging: {mode} has no HBM to stage to; start with staging=auto")
        return
    with torch.inference_mode():
        staging.choose(mode)
