"""The points of one part: an engine, its results files, and what each point puts into them."""

from __future__ import annotations

import argparse
import gc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import serve_load
import serve_record as keep
import serve_steps
from serve_arms import Arm, Machine, Part
from serve_engine import PointFailed, ServeEngine

from vamp_integration.replay.child import device_name, versions
from vamp_integration.replay.trace import Trace

FAILED, LEFT_OUT = 1, 3
# To guess how long things take: an engine's start, a point of decode steps, tokens prefilled in a second.
START_S, STEPS_S, PREFILL_PER_S = 90.0, 8.0, 55_000


class Points:
    """Measures points in one engine, which starts with the first of them, as long as the clock allows.

    Args:
        arguments: of the sub-command.
        name: of the part, for the results files.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        name: str,
        part: Part,
        machine: Machine,
        trace: Trace,
        plan: serve_steps.Plan,
    ) -> None:
        self.arguments, self.part, self.machine, self.trace, self.plan = arguments, part, machine, trace, plan
        self.name = name if machine.kernel == "vamp" or not part.vamp else f"{name}-vllm-kernel"
        self.progress = keep.Progress(arguments.out, self.name)
        self.clock = keep.Clock(arguments.budget_s)
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self._engine: ServeEngine | None = None
        self._ready: dict[str, Any] = {}
        self._results: dict[str, keep.Results] = {}

    def replay(self, arm: Arm, sessions: int) -> None:
        trace, measure_s = serve_load.take(self.trace, sessions), self.arguments.measure
        row = {
            "arm": arm.name,
            "trace": trace.name,
            "workload": self.arguments.workload,
            "sessions": sessions,
            "concurrency": sessions,
            "measure_s": measure_s,
            "max_offload_ratio": arm.ratio,
            "policy": arm.policy,
            "staging": arm.staging,
            "moe_kernel": self.machine.kernel if arm.vamp else "vllm",
        }
        first_s = sum(session.turns[0].input_length for session in trace.sessions) / PREFILL_PER_S
        seed = zlib.crc32(f"{self.arguments.seed} {arm.name} {sessions}".encode())

        def measure(engine: ServeEngine) -> dict[str, Any]:
            engine.reset(arm)
            stop, fill_s = (lambda: self.clock.stopped), self.arguments.fill
            done = serve_load.replay(engine, trace, seed, measure_s, fill_s, self.progress, stop)
            path = self.arguments.out / f"trace-{self.name}-{arm.name}-{sessions}.json.gz"
            engine.steps.write(path, done[0].turns, done[1]["start"])
            run = serve_load.windowed(arm.name, arm.ratio, *done, self._ready)
            return self._pool(engine) | serve_load.row_figures(run, *done)

        self._point("replay", row, first_s + measure_s + 10, measure)

    def steps(self, share: float, batch: int, number: int) -> None:
        row = {"arm": self._engine_name(), "batch": batch, "level_share": share, "pass": number}
        self._point(
            "decode_step",
            row,
            STEPS_S,
            lambda engine: serve_steps.measure_steps(engine, self.plan, share, batch),
        )

    def growth(self, repeat: int) -> None:
        row = {"arm": self._engine_name(), "host_kv_gib": self._host_kv_gib()}
        row |= {"batch": self.plan.growth_batch, "repeat": repeat}
        self._point(
            "growth", row, STEPS_S, lambda engine: serve_steps.measure_growth(engine, self.plan, not repeat)
        )

    def close(self) -> int:
        """The exit code: 0 where every point is in the results."""
        self.progress("end", left_out=self.left_out, failed=self.failed)
        return FAILED if self.failed else LEFT_OUT if self.left_out else 0

    def _point(
        self, kind: str, row: keep.Row, seconds: float, measure: Callable[[ServeEngine], keep.Row]
    ) -> None:
        """Measure and keep a row, unless it is there already or would take longer than there is time for."""
        name = " ".join(str(row[key]) for key in keep.KEYS[kind])
        if self._earlier(kind).has(row):
            self.progress("kept", point=name)
            return
        if not self.clock.allows(seconds + (0 if self._engine else START_S)):
            self.left_out.append(name)
            return
        engine = self._engine or self._start()
        self.progress("begin", point=name)
        # What other points have left is in no pause of this one: the load is in the engine's process, where
        # vLLM does the same with what is there after the start.
        gc.collect()
        gc.freeze()
        try:
            figures = measure(engine)
        except serve_load.Stopped:
            self.left_out.append(name)
            return
        except PointFailed as error:
            self.failed.append(f"{name}: {error}")
            self.progress("failed", point=name, message=str(error))
            return
        self._earlier(kind).add(row | self._about_engine() | figures)
        shown = (
            "ttft_s_p90",
            "tpot_s_p50",
            "turns_per_s",
            "prefix_hit_rate",
            "ms_median",
            "bubble_ms",
            "total_ms",
        )
        self.progress("point", point=name, **{key: figures[key] for key in shown if key in figures})

    def _start(self) -> ServeEngine:
        self.progress("starting")
        engine = ServeEngine(self.part, self.machine, self.arguments.routing)
        self._ready = engine.describe()
        self.progress("started", seconds=round(engine.startup_s, 1), blocks=self._ready["blocks"])
        serve_steps.warm_up(engine, self.plan)
        self._engine = engine
        return engine

    def _earlier(self, kind: str) -> keep.Results:
        """The results of this part and kind, with what earlier runs put there."""
        if kind not in self._results:
            given, folder = self.arguments, self.arguments.out
            about = keep.about(given.given, given.commit, device_name(), versions(), self._notes())
            about["anchor"] = given.anchor or self._find_anchor(folder)
            self._results[kind] = keep.Results(folder, kind, self.name, about)
        return self._results[kind]

    def _find_anchor(self, folder: Path) -> str | None:
        if "vllm" in self.part.arms:
            return "this file"
        found = [path for name in ("anchor", "plain") for path in folder.glob(f"*-replay-{name}.json")]
        return sorted(found)[-1].name if found else None

    def _notes(self) -> list[str]:
        arguments, machine = self.arguments, self.machine
        routing = (
            f"ROUTING IS SIMULATED in every arm: {arguments.routing}, not what the model's routers chose"
            if arguments.routing
            else "the routing is that of random weights"
        )
        notes = [
            routing,
            *(["weights are random: tokens mean nothing"] if machine.random_weights else []),
            f"{machine.kv_bytes / 2**30:.3f} GiB of HBM for KV, staging and reserve together in all arms but "
            "upper_bound",
            "figures of turns that end in the seconds measured, which begin when every session has ended its "
            "first turn; what VAMP did (decisions, moves, bytes) is of the whole replay",
            "TTFT from submission; one request of a session in flight; engine core and load in one process",
            *self.trace.notes,
        ]
        if self.part.pool == "upper" and "vllm" in self.part.arms:
            notes.append("vllm is the engine of upper_bound with blocks withheld from its pool")
        return notes

    def _engine_name(self) -> str:
        if not self.part.vamp:
            return "vllm"
        name = "vamp" if self.machine.kernel == "vamp" else "vamp_vllm_kernel"
        return f"{name}_peer" if self.machine.vamp.get("peer_hbm_gib") else name

    def _host_kv_gib(self) -> float:
        return self.machine.host_kv_gib if self.part.host_kv else 0

    def _about_engine(self) -> dict[str, Any]:
        ready, arguments, machine = self._ready, self.arguments, self.machine
        return {
            "model": Path(machine.model).name,
            "layers": ready["layers"],
            "tp": ready["tp"],
            "routing": f"SIMULATED {arguments.routing}" if arguments.routing else "random weights",
            "max_num_seqs": machine.max_num_seqs,
            "max_num_batched_tokens": machine.max_num_batched_tokens,
            "engine_args": " ".join(arguments.engine_arg),
            "vamp_args": " ".join(arguments.vamp_arg) if self.part.vamp else "",
            "host_kv_gib": self._host_kv_gib(),
            "hbm_used_gib": ready["hbm_used_gib"],
        }

    def _pool(self, engine: ServeEngine) -> dict[str, Any]:
        """The KV pool that the replay began with."""
        share = engine.limit.blocks / engine.started_blocks if not self.part.vamp else 1.0
        return {"kv_gib": self._ready["kv_bytes"] * share / 2**30, "blocks_withheld": engine.limit.held}
