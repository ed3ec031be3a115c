"""The arms of a comparison and the environment that each one's process gets."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vamp_integration import settings
from vamp_integration.lognormal import NAME, VARIABLE
from vamp_integration.plan import check_plan
from vamp_runtime.errors import ConfigError

UPPER_BOUND = "upper_bound"
KNOWN = "vllm, upper_bound or vamp_paper_<ratio> with a ratio above 0 and below 1, such as vamp_paper_0.15"


@dataclass(frozen=True)
class Arm:
    """One engine of the comparison.

    Attributes:
        name: as in the recorded results.
        max_offload_ratio: largest share of the experts VAMP may move out of HBM; 0 for an unmodified engine.
    """

    name: str
    max_offload_ratio: float = 0.0

    @property
    def vamp(self) -> bool:
        return self.max_offload_ratio > 0


def parse_arm(name: str) -> Arm:
    """Arm from its name.

    Raises:
        ConfigError: unknown name, or a ratio outside (0, 1).
    """
    if name in ("vllm", UPPER_BOUND):
        return Arm(name)
    match = re.fullmatch(r"vamp_paper_(\d*\.?\d+)", name)
    if match is None or not 0 < float(match[1]) < 1:
        raise ConfigError(f"--arm is {name}; give {KNOWN}")
    return Arm(name, float(match[1]))


def parse_engine_args(pairs: list[str]) -> dict[str, Any]:
    """``key=value`` pairs, each value as JSON, or as text where it is none.

    Raises:
        ConfigError: a pair without a name or sign.
    """
    result: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise ConfigError(f"--engine-arg is {pair}; give key=value, such as enforce_eager=true")
        try:
            result[key] = json.loads(value)
        except json.JSONDecodeError:
            result[key] = value
    return result


def engine_options(
    arm: Arm, base: dict[str, Any], kv_cache_bytes: int, vamp: dict[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs`` for ``arm``; arms differ in nothing but what is set here.

    Args:
        arm: the arm.
        base: options that all arms share.
        kv_cache_bytes: size of the KV pool at start.
        vamp: more settings of VAMP for its arms, such as ``policy``; by default VAMP takes the paper's cost
            model with the profile for its device.
    """
    options = {**base, "kv_cache_memory_bytes": kv_cache_bytes}
    if arm.vamp:
        chosen = {"max_offload_ratio": arm.max_offload_ratio, **vamp}
        more = base.get("additional_config", {})
        options |= {"load_format": "vamp", "additional_config": {**more, "vamp": chosen}}
    return options


def check_model(model: str) -> None:
    """Raise ``ConfigError`` where ``model`` is written as a folder and there is none with a configuration."""
    folder = Path(model).expanduser()
    if model.startswith(("/", ".", "~")) and not (folder / "config.json").is_file():
        raise ConfigError(f"--model is {model}; give a folder with config.json and weights in it")


def check_arm(
    arm: Arm, model: str, kv_cache_bytes: int, engine_args: dict[str, Any], vamp: dict[str, Any]
) -> None:
    """Check what VAMP's arm can be told before an engine starts, so that no other arm runs in vain.

    Raises:
        ConfigError, ProfileError: in one line, the setting, its value and what would work.
    """
    if not arm.vamp:
        return
    chosen = settings.parse({"max_offload_ratio": arm.max_offload_ratio, **vamp})
    config = Path(model) / "config.json"
    if config.is_file():
        ranks = int(engine_args.get("tensor_parallel_size", 1))
        check_plan(chosen, json.loads(config.read_text()), ranks, kv_cache_bytes)


def child_environment(parent: dict[str, str], arm: Arm, threads: int) -> dict[str, str]:
    """Environment of the arm's process.

    An unmodified engine must not even load the plugin, so ``VLLM_PLUGINS`` names it for VAMP's arms only. The
    engine core stays in the process, where its scheduler can be watched. What the user has set otherwise is
    kept. Simulated routing, where it is asked for, is every arm's.
    """
    plugins = ["vamp"] if arm.vamp else []
    if parent.get(VARIABLE, "").startswith(NAME):
        plugins.append("vamp_benchmark_routing")
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ",".join(plugins)}
    return {**defaults, **parent, **fixed}
