"""MODELLED: predictions, not measurements. The serving benchmark on a modelled device.

python bench/serve_model.py --sessions 28 --arms vllm upper_bound vamp_measured_0.25

vLLM's own scheduler and KV cache manager and VAMP's scheduler and policies, driven by the sessions and the
closed loop of serve_h200.py, on a virtual clock (modelled_device.py). Nothing is computed. Results go to
out/modelled.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import serve_load
from serve_arms import GIB, PARTS, Arm, Machine, Part, engine_options, parse_arm, set_environment
from serve_engine import ServeEngine

from vamp_integration.replay.arms import parse_engine_args
from vamp_runtime.errors import ConfigError

LABEL = "modelled: predictions, not measurements"


class ModelledEngine(ServeEngine):
    """``ServeEngine`` on a modelled device."""

    def __init__(self, part: Part, machine: Machine, model: Any, clock: Any) -> None:
        from modelled_device import ModelledExecutor
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        from vamp_integration.replay.observe import Watch

        ModelledExecutor.clock, ModelledExecutor.model = clock, model
        # Planned as an unmodified engine: checks of the host's memory and kernels mean nothing here.
        arguments = EngineArgs(**engine_options(replace(part, vamp=False), machine))
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        config.parallel_config.distributed_executor_backend = ModelledExecutor
        config.scheduler_config.async_scheduling = True
        config.device_config.device_type = "cuda"
        config.scheduler_config.scheduler_cls = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
        if part.vamp:
            chosen = {"max_offload_ratio": machine.max_ratio, "policy": "paper", **machine.vamp}
            config.cache_config.num_gpu_blocks_override = model.blocks
            config.load_config.load_format = "vamp"
            config.additional_config = {"vamp": chosen}
            config.scheduler_config.scheduler_cls = "vamp_integration.scheduler.VampAsyncScheduler"
        self.engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        core: Any = self.engine.engine_core
        self.core = core.engine_core
        self.device = self.core.model_executor
        self.watch = Watch(self.core.scheduler)
        self.part, self.machine, self.clock, self.model = part, machine, clock, model
        self._observe()

    def submit(self, request_id: str, prompt: list[int], output_tokens: int) -> None:
        super().submit(request_id, prompt, output_tokens)
        self.clock.sleep(len(prompt) * self.model.submit_token_s)

    def _stage(self, mode: str) -> None:
        self.device.region = mode == "region"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", nargs="+", type=int, default=[28])
    parser.add_argument("--arms", nargs="+", default=["vllm", "upper_bound", "vamp_measured_0.25"])
    parser.add_argument("--measure", type=float, default=90.0)
    parser.add_argument("--fill", type=float, default=180.0)
    parser.add_argument("--workload", default="peak140k")
    parser.add_argument("--traces", type=Path, default=Path("out/traces"))
    parser.add_argument("--model", default="out/qwen3-next-80b-a3b", help="folder of the config.json")
    parser.add_argument("--policy", default="paper", help="policy profile of arms whose kind names none")
    parser.add_argument("--kv-gib", type=float, default=8.02)
    parser.add_argument("--upper-gib", type=float, default=40.0)
    parser.add_argument("--host-kv-gib", type=float, default=40.0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="of StepModel")
    parser.add_argument("--engine-arg", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--vamp-arg", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("out/modelled"))
    arguments = parser.parse_args(argv)
    try:
        rows = run(arguments)
    except ConfigError as error:
        print(f"serve_model.py: {error}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open(arguments.out / "modelled.jsonl", "a", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every arm at every number of sessions, one engine of each kind."""
    arms = [parse_arm(name, arguments.policy) for name in arguments.arms]
    workload = serve_load.workload(arguments.workload)
    trace = serve_load.read(workload, arguments.traces)
    set_environment(PARTS["plain"], "", arguments.out.absolute())
    from modelled_device import Clock, StepModel, virtual_time

    model = replace(StepModel(), **parse_engine_args(arguments.set))
    machine = Machine(
        model=arguments.model,
        layers=model.layers,
        random_weights=True,
        kv_bytes=int(arguments.kv_gib * GIB),
        upper_bytes=int(arguments.upper_gib * GIB),
        host_kv_gib=arguments.host_kv_gib,
        max_ratio=0.25,
        max_model_len=workload.max_model_len,
        max_num_seqs=128,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        kernel="vamp",
        engine=parse_engine_args(arguments.engine_arg),
        vamp={"hardware": "h200", **parse_engine_args(arguments.vamp_arg)},
    )
    clock, rows = Clock(), []
    for name in ("plain", "offload", "vamp", "spill"):
        mine = [arm for arm in arms if arm.kind in PARTS[name].arms]
        if not mine:
            continue
        chosen = model.unstaged() if PARTS[name].host_kv else model
        engine = ModelledEngine(PARTS[name], machine, chosen, clock)
        with virtual_time(clock):
            warm_up(engine)
            for sessions in arguments.sessions:
                rows += [measure(engine, arm, serve_load.take(trace, sessions), arguments) for arm in mine]
    return rows


def warm_up(engine: ModelledEngine) -> None:
    """One short request: the workers' capacity comes with its first step."""
    engine.submit("warm", list(range(40)), 4)
    engine.drain()


def measure(engine: ModelledEngine, arm: Arm, trace: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    engine.reset(arm)
    sessions = len(trace.sessions)
    seed = zlib.crc32(f"0 {arm.name} {sessions}".encode())
    progress: list[dict[str, Any]] = []

    def event(name: str, **values: Any) -> None:
        progress.append(values)
        print(f"  {LABEL}: {arm.name} {values}", flush=True)

    done = serve_load.replay(engine, trace, seed, arguments.measure, arguments.fill, event, lambda: False)
    path = arguments.out / f"trace-{arm.name}-{sessions}.json.gz"
    engine.steps.write(path, done[0].turns, done[1]["start"])
    figures = serve_load.row_figures(serve_load.windowed(arm.name, arm.ratio, *done, {}), *done)
    row = {"what": LABEL, "arm": arm.name, "sessions": sessions, **figures}
    shown = ("turns_per_s", "ttft_s_p50", "ttft_s_p90", "ttft_s_p99", "tpot_s_p50", "prefix_hit_rate")
    shown += ("level_mean", "level_max", "moves", "evicted_blocks")
    text = ", ".join(f"{key} {row[key]:.4g}" for key in shown)
    print(f"{LABEL}: {arm.name} at {sessions} sessions: {text}", flush=True)
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "traces")}
    return row | {"model": asdict(engine.model), "given": settings, "progress": progress}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
