"""An engine of the serving benchmark: started once, put back to its beginning between arms."""

from __future__ import annotations

import time
from typing import Any

from serve_arms import Arm, Machine, Part, engine_options
from serve_trace import StepLog

from vamp_integration.replay.child import VllmEngine
from vamp_runtime.errors import ConfigError

REST_S = 60.0


class PointFailed(RuntimeError):
    """A point cannot be measured; others can."""


class PoolLimit:
    """Takes blocks of an unmodified pool out of use: one engine stands for pools of several sizes."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self._held: list[Any] = []

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def blocks(self) -> int:
        return int(self.pool.num_gpu_blocks) - self.held

    def lift(self) -> None:
        self.pool.free_blocks(self._held)
        self._held = []

    def set(self, blocks: int) -> None:
        """Leave ``blocks`` in use; the pool must be empty."""
        assert not self._held
        self._held = self.pool.get_new_blocks(max(0, self.pool.num_gpu_blocks - blocks))


class ServeEngine(VllmEngine):
    """``VllmEngine`` that serves one arm after the other."""

    def __init__(self, part: Part, machine: Machine, routing: str) -> None:
        began = time.monotonic()
        if part.vamp:
            from vamp_integration import plugin

            plugin.register()
        use_routing(routing)
        super().__init__(engine_options(part, machine))
        self.startup_s = time.monotonic() - began
        self.part, self.machine = part, machine
        self._observe()

    def _observe(self) -> None:
        """What an arm's beginning and its trace need of the scheduler, once that is there."""
        self.limit, self.steps = PoolLimit(self.watch.pool), StepLog(self.scheduler)
        self.started_blocks = self.watch.pool.num_gpu_blocks

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def drain(self) -> None:
        """Step until nothing is under way, commands and steps in flight included."""
        until = time.monotonic() + REST_S
        while self.scheduler.has_requests() or self.core.batch_queue or self._moving():
            if time.monotonic() > until:
                raise PointFailed(f"the engine has not come to rest in {REST_S:g} s")
            self.engine.step()

    def abort(self, request_ids: list[str]) -> None:
        self.engine.abort_request(request_ids)
        self.drain()

    def reset(self, arm: Arm | None) -> None:
        """Empty every cache, go back to level 0, and decide as ``arm`` says; ``None`` holds level 0.

        Raises:
            ConfigError: this engine cannot serve the arm.
        """
        self.drain()
        self.limit.lift()
        until = time.monotonic() + REST_S
        while not self.engine.reset_prefix_cache(reset_connector=self.part.host_kv):
            # Blocks may still be on their way to host memory.
            if time.monotonic() > until:
                raise PointFailed(f"the prefix cache could not be emptied in {REST_S:g} s")
            time.sleep(0.1)
            self.engine.step()
        self.watch.preemptions = self.watch.evictions = 0
        self.steps.rows.clear()
        if self.part.vamp:
            self._reset_vamp(arm)
        elif arm is not None and arm.kind == "vllm" and self.part.pool == "upper":
            kept = self.machine.kv_bytes / self.machine.upper_bytes
            self.limit.set(int(self.started_blocks * kept))

    def _reset_vamp(self, arm: Arm | None) -> None:
        from vamp_integration import configure

        self.to_level(0)
        if arm is None:
            configure.forget(self.scheduler)
            return
        self._stage(arm.staging)
        chosen = {"policy": arm.policy, "max_offload_ratio": arm.ratio, "restore": arm.restore}
        if arm.kind == "paper":
            chosen |= {"prefill_share": 1.0}
        configure.configure(self.scheduler, chosen)
        if arm.kind == "fixed":
            self.to_level(self.levels(arm.ratio))
        else:
            configure.release(self.scheduler)
        configure.forget(self.scheduler)

    def _stage(self, mode: str) -> None:
        """Read host-backed experts by ``mode``, as VAMP's setting ``staging``, from now on."""
        from vamp_integration.staging import use_staging

        self.rpc(use_staging, mode)

    def levels(self, share: float) -> int:
        """The level at which ``share`` of the experts are out."""
        capacity = self.scheduler.arbiter.controller.capacity
        return int(share * capacity.experts / capacity.group + 1e-9)

    def to_level(self, level: int) -> float:
        """Hold ``level``; seconds that it took.

        Raises:
            PointFailed: the move failed.
        """
        from vamp_integration import configure

        began = time.monotonic()
        configure.hold(self.scheduler, level)
        self.drain()
        if self.scheduler.arbiter.controller.level != level:
            raise PointFailed(f"level {level} was not reached; the log says why")
        return time.monotonic() - began

    def rpc(self, function: Any, *args: Any) -> Any:
        """``function(worker, *args)`` on the first rank."""
        return self.engine.collective_rpc(function, args=args)[0]

    def sample(self) -> dict[str, int]:
        """State now, as ``Watch.sample``; blocks that are withheld count for nothing."""
        values, held = self.watch.sample(), self.limit.held
        return values | {"blocks": values["blocks"] - held, "used": values["used"] - held}

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"hbm_used_gib": hbm_used_gib()}

    def _moving(self) -> bool:
        return self.part.vamp and bool(self.scheduler.arbiter.controller.moving)


def hbm_used_gib() -> float | None:
    """Memory of the GPU in use, by whomever; ``None`` without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def use_routing(name: str) -> None:
    """Make VAMP's routing simulation known to vLLM, unmodified or not, where ``name`` is one; empty is none.

    Raises:
        ConfigError: vLLM knows no routing simulation of this name.
    """
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator

    if name.startswith("vamp_"):
        from vamp_integration import benchmark_routing

        benchmark_routing.register()
    known = RoutingSimulator.get_available_strategies()
    if name and name not in known:
        raise ConfigError(
            f"--routing {name}: vLLM knows {', '.join(known)}; give one of them, or '' for none"
        )
