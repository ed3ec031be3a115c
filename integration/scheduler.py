"""Hook: the scheduler owns the decision and the numbering of moves.

What: commands leave with ``SchedulerOutput``, reports come back with ``ModelRunnerOutput``; levels are taken
back when the pressure has gone, and groups exchanged when others have become colder; a request may be held
for a step instead of being preempted; figures for the metrics ride on vLLM's own.
Why: only ``schedule()`` knows demand, and only its output reaches every rank in order. How: ``scheduler_cls``
(``vllm/v1/core/sched/scheduler.py``). Exists as a mixin because the asynchronous scheduler is another class.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from vamp_integration import metrics, profiler_ranges, settings
from vamp_integration.arbiter import Arbiter
from vamp_integration.commands import get_report, put_command
from vamp_integration.costs import engine_costs
from vamp_integration.kv_manager import VampKVCacheManager
from vamp_integration.kv_offload import VampOffloadingConnector
from vamp_integration.measured import engine_facts, resolve_policy
from vamp_integration.plan import hardware_profile
from vamp_integration.pool import VampBlockPool
from vamp_integration.prefill_pace import PacedPrefills
from vamp_integration.reselect import Reselector
from vamp_integration.shrink import Shrinker

# Seconds between two sets of figures for the metrics.
FIGURES_EVERY_S = 0.1


class VampSchedulerMixin:
    """Scheduler side of VAMP. Mixed in before a vLLM scheduler class."""

    kv_cache_manager: KVCacheManager
    arbiter: Arbiter
    shrinker: Shrinker
    reselector: Reselector
    paced: PacedPrefills
    left_waiting: int = 0
    _figures_sent_at: float = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config  # type: ignore[attr-defined]
        chosen = settings.of(config)
        assert chosen is not None, "VAMP's scheduler needs --load-format vamp"
        profiler_ranges.follow(chosen)
        kv, block_size = self.kv_cache_config, self.block_size  # type: ignore[attr-defined]
        chosen = resolve_policy(chosen, kv, block_size, current_platform.is_cpu())
        pool = VampBlockPool.adopt(self.kv_cache_manager.block_pool)
        costs = engine_costs(chosen, config.model_config.hf_text_config, current_platform.is_cpu())
        hardware = hardware_profile(chosen, config.device_config.device_type)
        self._link = metrics.LinkRates(
            hardware.host_read_bandwidth.value, hardware.host_to_device_bandwidth.value
        )
        bubble_s = chosen.max_bubble_ms / 1e3
        self.arbiter = Arbiter(pool, costs, block_size, self._resize, bubble_s)
        self.shrinker = Shrinker(self.arbiter, chosen)
        self.reselector = Reselector(self.arbiter, chosen.reselect_mib_per_s)
        self.paced = PacedPrefills(self.arbiter, chosen.prefill_share, self._link.read)
        self.kv_cache_manager = VampKVCacheManager.adopt(self.kv_cache_manager, self.arbiter)
        connector = self.connector  # type: ignore[attr-defined]
        if connector is not None:
            # Every rank copies its own part of a block, all at once.
            block_bytes = kv.kv_cache_tensors[0].size // kv.num_blocks
            load_s = block_bytes / self._link.copy
            self.arbiter.host_kv = VampOffloadingConnector.adopt(connector, load_s)
        self.measure()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.arbiter.running, self.arbiter.waiting = len(self.running), self.left_waiting  # type: ignore[attr-defined]
        self.arbiter.levels.begin_step()
        self.shrinker.begin_step(self.left_waiting)
        self.reselector.begin_step()
        measured = self.arbiter.measured
        if measured is not None:
            measured.order(self.waiting)  # type: ignore[attr-defined]
        held = self.paced.hold(self)
        with self.paced.sharing(self):
            output: SchedulerOutput = super().schedule(throttle_prefills or held)  # type: ignore[misc]
        engine: Any = self
        # Requests that have just arrived or are held back are no sign of pressure; those not admitted are.
        if not held:
            self.left_waiting = len(engine.waiting)
        left, budget = None if held else self.left_waiting, engine.max_num_scheduled_tokens
        self.paced.scheduled(output, budget, left, engine.block_size)
        put_command(output, self.arbiter.command())
        if measured is not None:
            measured.step(output.total_num_scheduled_tokens)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        report = get_report(model_runner_output)
        if report is not None:
            self.arbiter.settle(report)
            if report.swaps is not None:
                self.reselector.offer(report.swaps)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's figures of a step, and VAMP's beside them (``metrics.py``)."""
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is None:
            return None
        now, idle = time.monotonic(), not stats.num_running_reqs + stats.num_waiting_reqs
        # Not in every step, for what it costs; but what an idle engine has sent last must be the latest.
        if idle or now - self._figures_sent_at >= FIGURES_EVERY_S:
            self._figures_sent_at = now
            held = self.paced.pace.held_steps
            metrics.put(stats, metrics.values(self.arbiter, self._link, held))
        return stats

    def has_requests(self) -> bool:
        """Keeps the engine stepping while a command, a move's outcome or a finished cordon is to travel."""
        controller = self.arbiter.controller
        busy = controller.has_command or controller.moving or self.arbiter.pool.cordoned_free
        return busy or super().has_requests()  # type: ignore[misc]

    def _request_blocks_can_be_freed(self, request: Request) -> bool:
        """No victim while levels are on their way: the request is held for a step, not preempted."""
        return not self.arbiter.holding and super()._request_blocks_can_be_freed(request)  # type: ignore[misc]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.arbiter.journal.preemptions += 1
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def measure(self) -> None:
        """Begin to measure anew, or stop: as the policy now chosen has it."""
        engine: Any = self
        kv = engine.kv_cache_config, engine.block_size
        self.arbiter.measure(lambda: engine_facts(engine.vllm_config, *kv, self.paced.pace.share))

    def vamp_report(self) -> dict[str, Any]:
        """Level, blocks, moves and decisions so far, as plain data."""
        return self.arbiter.journal.report(self.arbiter.controller)

    def _resize(self, num_blocks: int) -> None:
        """Tell vLLM's other holders of the number of blocks."""
        self.kv_cache_config.num_blocks = num_blocks  # type: ignore[attr-defined]
        self.cache_config.num_gpu_blocks = num_blocks  # type: ignore[attr-defined]


class VampScheduler(VampSchedulerMixin, Scheduler):
    """``scheduler_cls`` of engines without asynchronous scheduling (the CPU engine)."""


class VampAsyncScheduler(VampSchedulerMixin, AsyncScheduler):
    """``scheduler_cls`` of engines with asynchronous scheduling (the GPU engine's default)."""
