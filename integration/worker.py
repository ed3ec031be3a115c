"""Hook: the worker carries out moves before the step that depends on them.

What: a mixin over vLLM's worker (``vllm/v1/worker/gpu_worker.py``, ``cpu_worker.py``): keeps the reserve out
of the KV budget, lays the KV cache into the region, obeys ``SchedulerOutput.vamp`` at the top of
``execute_model`` and answers with the step's output. Why there: every rank sees steps in one order.
How: ``worker_cls``. vLLM only logs an exception of a rank that does not return output, so a move that fails
beyond repair ends the process.
"""

from __future__ import annotations

import os
import traceback
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from vamp_integration import kv_memory, plan, profiler_ranges, settings
from vamp_integration.agreement import make_agreement
from vamp_integration.cold_reads import ColdReads
from vamp_integration.commands import MemoryFigures, Report, get_command, put_report
from vamp_integration.hit_counts import HitCounts
from vamp_integration.host_reads import HostReads, StagedAhead, experts_in
from vamp_integration.log import logger
from vamp_integration.placement import ExpertMemory
from vamp_kernels.ranges import ranged
from vamp_runtime.controller import Capacity, StepCommand
from vamp_runtime.errors import ConfigError, DriverError
from vamp_runtime.memory.boundary import Boundary
from vamp_runtime.memory.copy_times import StagingSeconds
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.kv_region import KVRegion
from vamp_runtime.memory.mover import Mover
from vamp_runtime.memory.slab import ExpertSlab
from vamp_runtime.memory.tensor import tensor_at
from vamp_runtime.policy.reselect import Candidate, DecayedUse, best_swap, coldest_first, steady_order

EXIT_STATE_LOST = 70
# The first look at the hit counters comes after so many steps, each further one after twice as many as the
# one before, up to the usual number: an engine that has just started knows nothing of its traffic.
FIRST_LOOK_STEPS = 32
# More than asynchronous scheduling launches ahead: what such a step reads must not be copied over.
MOST_STEPS_IN_FLIGHT = 4


class VampWorkerMixin:
    """Worker side of VAMP. Mixed in before a vLLM worker class."""

    #: Steps between two looks at the hit counters, fewer at first; a look costs the host milliseconds.
    home_refresh_steps = 64

    _memory: ExpertMemory
    _boundary: Boundary
    _mover: Mover
    _hit_counts: HitCounts
    _host_reads: HostReads
    _peer_reads: HostReads
    _home_bytes_copied: int = 0
    _use: DecayedUse
    _cold_reads: ColdReads
    _kv_buffer: kv_memory.KVBuffer | None = None
    _capacity_report: Report | None = None
    _report: Report | None = None
    _claim: int | None = None
    _homes_due: bool = False
    _homes_followed_at: int = 0
    _looked_at: int = 0
    _steps: int = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        profiler_ranges.follow(self._settings())
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        memory = getattr(self.model_runner.get_model(), "vamp_memory", None)  # type: ignore[attr-defined]
        if memory is None:
            raise ConfigError("load_format: VAMP's worker needs --load-format vamp")
        self._memory = memory
        self._hit_counts = HitCounts(memory.hits)
        expert_bytes, staging = memory.slab.geometry.expert_bytes, memory.staging
        self._host_reads = HostReads(expert_bytes, StagedAhead if staging is None else staging.so_far)
        self._peer_reads = HostReads(expert_bytes)
        geometry, groups = memory.slab.geometry, group_of(memory.slab)
        self._use = DecayedUse(groups, geometry.groups)
        self._cold_reads = ColdReads(groups, geometry.groups, geometry.max_level)

    def determine_available_memory(self) -> int:
        """Bytes for the block pool: vLLM's figure less staging and reserve, in whole pages of every tail."""
        # Asked before: vLLM may put a figure of its own there, from the free memory of an earlier start.
        given = self.cache_config.kv_cache_memory_bytes  # type: ignore[attr-defined]
        available: int = super().determine_available_memory()  # type: ignore[misc]
        geometry = self._memory.slab.geometry
        if given:
            # A figure from free memory has what loading took, staging too, taken off already.
            available -= plan.staging_share(self._settings(), geometry, available)
        self._reserve_pages = plan.reserve_pages(self._settings(), geometry, available)
        pages = available // geometry.page_bytes - self._reserve_pages
        return (pages - pages % self._kv_tails()) * geometry.page_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Lay the KV cache into a region with room for every level; only its head is backed."""
        slab, driver = self._memory.slab, self._memory.driver
        geometry = slab.geometry
        positions, block_stride = kv_memory.layout(kv_cache_config)
        # From what the ranks agreed on, never from this rank's own free memory: all must hold the same.
        pages = positions * -(-kv_cache_config.num_blocks * block_stride // geometry.page_bytes)
        pages += self._reserve_pages
        most = pages + geometry.max_level * geometry.pages_per_level
        kv = kv_memory.region_geometry(kv_cache_config, geometry.page_bytes, most)
        region = KVRegion(driver, self._memory.ledger, kv, pages=pages)
        region.claim(kv_cache_config.num_blocks)
        buffer = tensor_at(region.address(0, 0), (region.nbytes,), torch.int8, self._memory.hits.device)
        self._kv_buffer = kv_memory.KVBuffer(buffer)
        config = kv_memory.virtual_config(self.vllm_config, kv_cache_config, kv.virtual_blocks)  # type: ignore[attr-defined]
        super().initialize_from_config(config)  # type: ignore[misc]
        if self._kv_buffer.taken != 1:
            raise ConfigError("vllm: its KV cache was not allocated in the KV region; use vLLM 0.32.0")
        # vLLM has written the virtual number of blocks here; the scheduler's pool has the mapped ones.
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks  # type: ignore[attr-defined]
        self._memory.ledger.seal()
        self._boundary = Boundary(slab, region, make_agreement(), driver)
        self._mover = Mover(
            self._boundary,
            self._memory.update_tables,
            end_process,
            driver.bind_thread,
            beside=self._memory.tables is not None,
        )
        capacity = self._capacity(pages)
        self._capacity_report = Report(capacity=capacity, memory=self._figures())
        logger.info(
            "VAMP: KV cache of %d blocks now, %d mapped, at most %d; virtual %d MiB",
            kv_cache_config.num_blocks,
            region.blocks,
            capacity.blocks_at[-1],
            region.nbytes >> 20,
        )

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        # The warm-up takes steps of its own, whose outputs nobody reads and whose tokens mean nothing.
        self._report, self._steps, self._looked_at = self._capacity_report, 0, 0
        self._memory.hits.zero_()
        self._hit_counts = HitCounts(self._memory.hits)
        # Not before: no page may be mapped while a graph is captured.
        self._mover.cover()
        return times

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache" and self._kv_buffer is not None:
            return self._kv_buffer
        return super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc, no-any-return]

    @ranged("step")
    def execute_model(self, scheduler_output: Any) -> Any:
        try:
            self._obey(get_command(scheduler_output), not scheduler_output.total_num_scheduled_tokens)
            self._steps += 1
            self._follow_use()
        except BaseException:
            # vLLM would only log this on most ranks and then wait for ever in a collective.
            traceback.print_exc()
            end_process()
        return self._answer(super().execute_model(scheduler_output))  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._answer(super().sample_tokens(grammar_output))  # type: ignore[misc]

    def vamp_hits(self) -> list[list[int]]:
        """Tokens routed to each expert, ``[layers][experts]``, since start; for ``collective_rpc``."""
        hits: list[list[int]] = self._memory.hits.tolist()
        return hits

    @ranged("obey")
    def _obey(self, command: StepCommand | None, idle: bool) -> None:
        """Carry moves on and begin those that the step brings; ``idle`` steps may as well wait for one."""
        move = command.move if command is not None else None
        if command is not None:
            self._claim = command.claimed_blocks
        self._take_outcome(wait=idle or move is not None)
        if move is not None:
            self._mover.start(move)
            self._take_outcome(wait=idle)

    def _follow_use(self) -> None:
        """Every so many steps, order groups by measured use; then let homes follow, between moves."""
        if self._steps - self._looked_at >= look_after(self._looked_at, self.home_refresh_steps):
            self._looked_at = self._steps
            if self.parallel_config.tensor_parallel_size > 1:  # type: ignore[attr-defined]
                # Homes must follow in the same step on every rank, so that the next move finds the same ones.
                self._take_outcome(wait=True)
            self._order_by_use()
        due = self._homes_due and self._steps - self._homes_followed_at >= MOST_STEPS_IN_FLIGHT
        if due and not self._mover.busy:
            self._homes_followed_at = self._steps
            with self._mover.paused():
                self._follow_coldest()

    def _take_outcome(self, wait: bool) -> None:
        outcome = self._mover.finish(wait)
        if outcome is not None:
            self._report = replace(self._report or Report(), outcome=outcome, memory=self._figures())
        if self._claim is not None and not self._mover.busy:
            # Bookkeeping of who owns a page; the region is the mover's while a move is under way.
            self._boundary.region.claim(self._claim)
            self._claim = None

    @ranged("order by use")
    def _order_by_use(self) -> None:
        """Order groups by measured use: in the same step on every rank, also while a move is under way."""
        counted = self._hit_counts.poll(self._steps)
        if counted is None:
            self._host_reads.look(None, 0, ())  # what has been staged until now belongs to the next counts
            return
        slab, (counts, steps) = self._memory.slab, counted
        movable, front = slab.geometry.movable_groups, self._mover.ahead_levels
        coldest: list[list[int]] = []
        for layer, use in enumerate(self._use.update(counts)):
            resident = frozenset(slab.coldest(layer, movable))
            order = steady_order(slab.coldness(layer), resident, coldest_first(use, movable), front)
            slab.set_coldness(layer, order)
            coldest.append(order)
        if self._memory.staging is not None:
            self._memory.staging.learn(counts)
        self._host_reads.look(counts, steps, experts_in(slab, Tier.HOST))
        if slab.geometry.peer_homes:
            self._peer_reads.look(counts, steps, experts_in(slab, Tier.PEER))
        reads = self._cold_reads.look(counts, steps, coldest)
        self._report, self._homes_due = replace(self._report or Report(), reads=reads), True

    def _follow_coldest(self) -> None:
        """Let the home pages follow that order, at a bounded rate, and offer the swaps it speaks for."""
        slab, self._homes_due = self._memory.slab, False
        try:
            self._home_bytes_copied += slab.refresh_homes(self._settings().home_refresh_mib << 20)
        except DriverError as error:
            # Homes without a finished copy stay empty: their groups cannot leave, and nothing is wrong.
            logger.warning("VAMP: copying experts to their home pages failed (%s)", error)
        self._report = replace(self._report or Report(), memory=self._figures())
        if self._settings().reselect_mib_per_s:
            self._report = replace(self._report or Report(), swaps=self._swaps())

    def _swaps(self) -> tuple[Candidate, ...]:
        """In every layer, the swap that use speaks for, where there is one."""
        slab = self._memory.slab
        found = (
            best_swap(layer, use, slab.out(layer), slab.ready(layer, slab.geometry.groups))
            for layer, use in enumerate(self._use.use)
        )
        return tuple(candidate for candidate in found if candidate is not None)

    def _answer(self, output: Any) -> Any:
        if self._report is None or not isinstance(output, ModelRunnerOutput):
            return output
        report, self._report = self._report, None
        return put_report(output, report)

    def _figures(self) -> MemoryFigures:
        ledger, staging = self._memory.ledger, self._memory.staging
        return MemoryFigures(
            pages={kind.value: pages for kind, pages in ledger.by_kind().items()},
            page_bytes=ledger.page_bytes,
            home_bytes_copied=self._home_bytes_copied,
            host_bytes_read=self._host_reads.nbytes,
            staged_bytes=0 if staging is None else staging.nbytes,
            peer_bytes_read=self._peer_reads.nbytes,
            home_pages=home_pages(self._memory.slab.geometry),
            staging=StagingSeconds() if staging is None else staging.seconds,
        )

    def _capacity(self, pages: int) -> Capacity:
        geometry = self._memory.slab.geometry
        kv = self._boundary.region.geometry
        levels = range(geometry.max_level + 1)
        return Capacity(
            blocks_at=tuple(
                kv.blocks_for_pages(pages + level * geometry.pages_per_level) for level in levels
            ),
            experts=geometry.experts,
            group=geometry.group,
            level_bytes=geometry.pages_per_level * geometry.page_bytes,
            layers=geometry.layers,
            beside_steps=self._memory.tables is not None,
        )

    def _kv_tails(self) -> int:
        """How many tails the KV cache will have; each of them begins pages of its own."""
        return 1

    def _settings(self) -> settings.VampSettings:
        chosen = settings.of(self.vllm_config)  # type: ignore[attr-defined]
        assert chosen is not None
        return chosen


def look_after(looked_at: int, usual: int) -> int:
    """Steps from the last look, at step ``looked_at``, to the next."""
    return min(usual, max(looked_at, FIRST_LOOK_STEPS))


def group_of(slab: ExpertSlab) -> list[list[int]]:
    """``[layers][experts]``, the group of each expert."""
    geometry = slab.geometry
    return [
        [slab.record(layer, expert) // geometry.group for expert in range(geometry.experts)]
        for layer in range(geometry.layers)
    ]


def home_pages(geometry: SlabGeometry) -> dict[str, int]:
    """Home pages by ``Tier.value``; they never change."""
    homes = {Tier.HOST: geometry.host_homes, Tier.PEER: geometry.peer_homes}
    return {tier.value: count * geometry.pages_per_level for tier, count in homes.items()}


def end_process() -> None:
    """End this rank at once: it may not serve another token."""
    logger.critical("VAMP: a move failed and could not be undone; ending the process")
    os._exit(EXIT_STATE_LOST)
