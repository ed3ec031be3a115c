"""A comparison: the same trace, the same budget of memory, one engine after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vamp_integration import compat
from vamp_runtime.errors import ConfigError

from .arms import UPPER_BOUND, Arm, check_arm, check_model, engine_options
from .child import ChildSpec
from .figures import ArmRun, TokenCheck, compare_tokens
from .load import load_trace
from .runner import run_arm
from .scale import Scaling, scale
from .trace import Trace

Show = Callable[[str, int], AbstractContextManager[Callable[[dict[str, Any]], None]]]


@dataclass(frozen=True)
class ReplayConfig:
    """All settings of a comparison.

    Attributes:
        trace: trace file.
        model: checkpoint folder or name.
        arms: arms to run, in order.
        kv_cache_bytes: KV pool of every arm but the upper bound, in bytes.
        format, block_tokens: see ``load_trace``.
        scaling: see ``Scaling``.
        concurrency: sessions in flight.
        check_tokens: also run the upper bound and compare output tokens with it.
        upper_kv_bytes: KV pool of the upper bound; None for ``kv_cache_bytes`` plus what VAMP's experts can
            give.
        max_model_len: longest prompt plus output; None for what the trace needs.
        max_num_seqs, max_num_batched_tokens: as in vLLM.
        engine_args: more keyword arguments of vLLM's ``EngineArgs``.
        vamp: more settings of VAMP's arms.
        warmup_turns: first turns of each session that are left out of the figures.
        max_seconds: see ``ClosedLoop``.
        threads: CPU threads of an engine.
        seed: seed of the prompts.
    """

    trace: Path
    model: str
    arms: tuple[Arm, ...]
    kv_cache_bytes: int
    format: str | None = None
    block_tokens: int | None = None
    scaling: Scaling = field(default_factory=Scaling)
    concurrency: int = 8
    check_tokens: bool = False
    upper_kv_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 1
    max_num_batched_tokens: int = 2048
    engine_args: dict[str, Any] = field(default_factory=dict)
    vamp: dict[str, Any] = field(default_factory=dict)
    warmup_turns: int = 1
    max_seconds: float | None = None
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        least = {
            "concurrency": 1,
            "kv_cache_bytes": 1,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "warmup_turns": 0,
            "threads": 1,
            "seed": 0,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                option = name.replace("_", "-")
                raise ConfigError(
                    f"--{option} is {getattr(self, name)}; give a whole number of at least {bound}"
                )
        names = [arm.name for arm in self.arms]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"--arm is {' '.join(names) or 'not given'}; give each arm once, such as --arm vllm"
            )
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ConfigError(f"--max-seconds is {self.max_seconds:g}; give seconds above 0, such as 170")


@dataclass(frozen=True)
class Comparison:
    """Result of ``replay_trace``."""

    config: ReplayConfig
    trace: Trace
    runs: tuple[ArmRun, ...]
    token_checks: tuple[TokenCheck, ...]


def prepare(config: ReplayConfig) -> Trace:
    """Load and scale the trace and check that it fits the settings; starts nothing.

    Raises:
        TraceError, ConfigError: a file or a setting that the user has to change.
    """
    trace = scale(load_trace(config.trace, config.format, config.block_tokens), config.scaling)
    longest = max(len(s.turns) for s in trace.sessions)
    if config.warmup_turns >= longest:
        raise ConfigError(
            f"--warmup-turns is {config.warmup_turns} but the longest session has {longest} turns; "
            f"give {longest - 1} or less"
        )
    unsized = config.upper_kv_bytes is None and not any(arm.vamp for arm in config.arms)
    if unsized and (config.check_tokens or Arm(UPPER_BOUND) in config.arms):
        raise ConfigError(
            "--upper-kv-bytes is not given and no VAMP arm sets the size of upper_bound; give it, such as "
            f"--upper-kv-bytes {4 * config.kv_cache_bytes}"
        )
    if config.max_model_len is not None and config.max_model_len < trace.max_tokens:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len} but a turn of {trace.name} needs {trace.max_tokens} "
            f"tokens; give --max-model-len {trace.max_tokens} or cut prompts with --max-prompt"
        )
    return trace


def upper_bound_bytes(config: ReplayConfig, runs: list[ArmRun]) -> int:
    """KV pool that holds as much as VAMP's can: the budget plus the experts that may leave.

    Raises:
        ConfigError: no arm could tell how large the experts are.
    """
    if config.upper_kv_bytes is not None:
        return config.upper_kv_bytes
    expert_bytes = max((run.ready["expert_bytes"] for run in runs), default=0)
    if not expert_bytes:
        raise ConfigError(
            "--upper-kv-bytes is not given and the experts' size cannot be read from these engines; give it, "
            f"such as --upper-kv-bytes {4 * config.kv_cache_bytes}"
        )
    return config.kv_cache_bytes + int(max(arm.max_offload_ratio for arm in config.arms) * expert_bytes)


def child_spec(config: ReplayConfig, trace: Trace, arm: Arm, kv_cache_bytes: int) -> ChildSpec:
    """What the process of ``arm`` has to do."""
    base = {
        "model": config.model,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "max_model_len": config.max_model_len or trace.max_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "seed": config.seed,
        **config.engine_args,
    }
    return ChildSpec(
        trace=str(config.trace),
        engine=engine_options(arm, base, kv_cache_bytes, config.vamp),
        concurrency=config.concurrency,
        format=config.format,
        block_tokens=config.block_tokens,
        scaling=asdict(config.scaling),
        seed=config.seed,
        keep_tokens=config.check_tokens,
        max_seconds=config.max_seconds,
    )


def remove_logs(logs: Path) -> None:
    """Take back what a refused run has written; folders that hold something else stay."""
    for log in logs.glob("*.log"):
        log.unlink()
    for folder in (logs, *logs.parents[:2]):
        if any(folder.iterdir()):
            return
        folder.rmdir()


def replay_trace(config: ReplayConfig, logs: Path, show: Show) -> Comparison:
    """Run every arm, one engine at a time.

    Args:
        config: the settings.
        logs: folder for one log file per arm.
        show: gives a context manager for (arm, turns) that takes the arm's events.

    Raises:
        TraceError, ConfigError: before anything is started.
        ArmFailed: an engine ended early.
    """
    trace = prepare(config)
    compat.check_version(compat.installed_vllm())
    check_model(config.model)
    for arm in config.arms:
        check_arm(arm, config.model, config.kv_cache_bytes, config.engine_args, config.vamp)
    arms = [arm for arm in config.arms if arm.name != UPPER_BOUND]
    if config.check_tokens or len(arms) < len(config.arms):
        arms.append(Arm(UPPER_BOUND))
    logs.mkdir(parents=True, exist_ok=True)
    runs: list[ArmRun] = []
    try:
        for arm in arms:
            size = upper_bound_bytes(config, runs) if arm.name == UPPER_BOUND else config.kv_cache_bytes
            spec = child_spec(config, trace, arm, size)
            with show(arm.name, trace.num_turns) as on_event:
                runs.append(run_arm(arm, spec, logs / f"{arm.name}.log", config.threads, on_event))
    except ConfigError:
        remove_logs(logs)
        raise
    checks = [compare_tokens(run, runs[-1]) for run in runs[:-1]] if config.check_tokens else []
    return Comparison(config, trace, tuple(runs), tuple(checks))
