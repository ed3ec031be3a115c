"""vLLM's engine core with asynchronous scheduling over VAMP's scheduler and GPU worker, on a CPU.

Scheduler, command channel, worker, mover, slab and KV region are real; below the worker is ``made_up``.
``support.engine`` runs this.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from support.made_up import Device, LateDriver, MadeUpModel, Served
from support.scenarios import EAGER, prompts
from vamp_integration import worker
from vamp_integration.commands import get_command, get_report
from vamp_integration.engine_args import ASYNC_SCHEDULER
from vamp_integration.worker_gpu import VampGPUWorker
from vamp_runtime.memory.agreement import SoleRank
from vamp_runtime.memory.boundary import MoveKind
from vamp_runtime.memory.host import HostDriver


class Rank(VampGPUWorker, MadeUpModel):
    home_refresh_steps = 16


class OneRank(UniProcExecutor):
    """vLLM's executor of one rank in the engine's process, with ours in the place of vLLM's worker."""

    driver_worker: Rank

    def _init_executor(self) -> None:
        worker.make_agreement = SoleRank
        device = Device()
        driver: Any = LateDriver(HostDriver(4096), device)
        self.driver_worker = Rank(self.vllm_config, device, driver)
        self.driver_worker.load_model()

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self.driver_worker.initialize_from_config(kv_cache_configs[0])


class Log:
    """What scheduler and rank did; two of the scheduler's methods are wrapped.

    Attributes:
        order: ``("scheduled" or "applied", number of the step)``.
        reported: steps whose output brought a move's outcome, and whether no move was in flight after it.
        tails: for every restore, who of the steps still in flight uses what goes: ``(step, request, whether
            the scheduler has it as running)``.
    """

    def __init__(self, scheduler: Any, rank: Rank) -> None:
        self.order: list[tuple[str, int]] = []
        self.reported: list[tuple[int, bool]] = []
        self.tails: list[list[tuple[int, str, bool]]] = []
        self._scheduler, self._rank = scheduler, rank
        self._schedule, scheduler.schedule = scheduler.schedule, self.schedule
        self._update, scheduler.update_from_output = scheduler.update_from_output, self.update
        self._scheduled = self._applied = 0

    def schedule(self, *args: Any) -> SchedulerOutput:
        output: SchedulerOutput = self._schedule(*args)
        command = get_command(output)
        if command is not None and command.move is not None and command.move.kind is MoveKind.RESTORE:
            self.tails.append(self._users(command.claimed_blocks))
        self.order.append(("scheduled", self._scheduled))
        self._scheduled += 1
        return output

    def update(self, output: SchedulerOutput, result: Any) -> Any:
        report = get_report(result)
        found = self._update(output, result)
        if report is not None and report.outcome is not None:
            self.reported.append((self._applied, self._scheduler.arbiter.controller.in_flight is None))
        self.order.append(("applied", self._applied))
        self._applied += 1
        return found

    def _users(self, limit: int) -> list[tuple[int, str, bool]]:
        running = {request.request_id for request in self._scheduler.running}
        return [
            (step, name, name in running)
            for step in range(self._applied, self._scheduled)
            for name, used in self._rank.steps[step].used.items()
            if max(used) >= limit
        ]


def two_deep(
    model: str,
    *,
    count: int,
    length: int,
    max_tokens: int,
    kv_bytes: int,
    reserve: int,
    caching: bool,
    every: int,
    burst: int,
    aborted: Sequence[int],
) -> dict[str, Any]:
    """A level moves whenever it can, up to the bound and down again, while requests come and go.

    ``burst`` of them come at once, ``every`` so many turns of the engine's loop; those ``aborted`` half-way.
    """
    core = EngineCore(_config(model, kv_bytes, reserve, caching), OneRank, log_stats=False)
    scheduler: Any = core.scheduler
    rank: Rank = core.model_executor.driver_worker  # type: ignore[attr-defined]
    log = Log(scheduler, rank)
    waiting = deque(
        Request(
            request_id=f"r{index}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            block_hasher=core.request_block_hasher,
        )
        for index, prompt in enumerate(prompts(6, count, length))
    )
    expected = {request.request_id: _alone(request, max_tokens) for request in waiting}
    tokens = _serve(core, waiting, every, burst, [f"r{index}" for index in aborted], max_tokens // 2)
    rank._mover.rest()
    rank._boundary.check_integrity()
    rank._boundary.slab.verify_all()
    controller = scheduler.arbiter.controller
    return {
        "tokens": tokens,
        "expected": expected,
        "wrong": rank.wrong,
        "initial": controller.initial_pool_blocks,
        "steps": [(step.claimed, step.highest) for step in rank.steps],
        "order": log.order,
        "outcomes": log.reported,
        "tails": log.tails,
        "beside": controller.capacity.beside_steps,
        **scheduler.arbiter.journal.report(controller),
    }


def _config(model: str, kv_bytes: int, reserve: int, caching: bool) -> Any:
    # Nothing in it goes by a clock.
    vamp = {"policy": EAGER, "model": "tiny-qwen3-next", "max_offload_ratio": 0.5, "prefill_share": 1}
    vamp |= {"exercise_steps": 1, "reserve_levels": reserve}
    config = EngineArgs(
        model=model,
        load_format="vamp",
        additional_config={"vamp": vamp},
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=caching,
        kv_cache_memory_bytes=8 << 20,
    ).create_engine_config()
    config.cache_config.kv_cache_memory_bytes = kv_bytes  # for the small slab, not for the model's
    # As on a GPU; for a CPU vLLM turns the first off and refuses the second.
    config.scheduler_config.async_scheduling = True
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER
    return config


def _serve(
    core: EngineCore, waiting: deque[Request], every: int, burst: int, aborted: list[str], abort_after: int
) -> dict[str, list[int]]:
    """Tokens of every request."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in waiting}
    turn = 0
    while waiting or core.scheduler.has_requests() or core.batch_queue:
        turn += 1
        assert turn < 20_000, "no progress"
        if turn % every == 1:
            for _ in range(min(burst, len(waiting))):
                core.add_request(waiting.popleft())
        if aborted and len(tokens[aborted[0]]) > abort_after:
            core.abort_requests([aborted.pop(0)])
        outputs, _ = core.step_fn()
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                tokens[output.request_id] += output.new_token_ids
    return tokens


def _alone(request: Request, max_tokens: int) -> list[int]:
    alone = Served(list(request.prompt_token_ids or ()), [])
    return [alone.sample() for _ in range(max_tokens)]
