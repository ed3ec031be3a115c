"""The arms of the serving benchmark, and the engines that they run in."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vamp_runtime.errors import ConfigError

GIB = 1 << 30
UNMODIFIED = ("vllm", "upper_bound", "vllm_host_kv")
#: What a kind of VAMP arm means: staging, and whether levels are taken back. The paper only expands.
VAMP_KINDS = {
    "paper": ("region", False),
    "direct": ("off", True),
    "auto": ("auto", True),
    "measured": ("auto", True),
    "spill": ("off", True),
    "fixed": ("off", False),
}
KNOWN = f"{', '.join(UNMODIFIED)} or vamp_<kind>_<ratio> with a kind of {', '.join(VAMP_KINDS)}, such as 0.15"


@dataclass(frozen=True)
class Arm:
    """One row of the comparison.

    Attributes:
        name: as in the recorded results.
        kind: one of ``UNMODIFIED`` or ``VAMP_KINDS``.
        ratio: largest share of the experts out of HBM; of ``fixed`` the share that always is.
        staging, restore, policy: as VAMP's settings.
    """

    name: str
    kind: str
    ratio: float = 0.0
    staging: str = "off"
    restore: bool = False
    policy: str = ""

    @property
    def vamp(self) -> bool:
        return self.kind in VAMP_KINDS


def parse_arm(name: str, policy: str) -> Arm:
    """Arm from its name; ``policy`` is that of arms whose kind does not name one.

    Raises:
        ConfigError: a name that is not known.
    """
    if name in UNMODIFIED:
        return Arm(name, name)
    match = re.fullmatch(r"vamp_([a-z]+)_(\d*\.?\d+)", name)
    if match is None or match[1] not in VAMP_KINDS or not 0 < float(match[2]) <= 1:
        raise ConfigError(f"--arms {name}: unknown; give {KNOWN}")
    staging, restore = VAMP_KINDS[match[1]]
    chosen = match[1] if match[1] in ("paper", "measured") else policy
    return Arm(name, match[1], float(match[2]), staging, restore, chosen)


@dataclass(frozen=True)
class Part:
    """An engine and what it can stand for; one sub-command each.

    Attributes:
        about: for the help text.
        arms: kinds of arms that can run in it.
        default: arms that run unless others are named.
        pool: ``anchor`` or ``upper``: which KV budget it starts with.
    """

    about: str
    arms: tuple[str, ...]
    default: tuple[str, ...]
    pool: str = "anchor"
    vamp: bool = False
    host_kv: bool = False


_PAPER = tuple(f"vamp_paper_{ratio}" for ratio in ("0.10", "0.15", "0.20", "0.25"))
_DIRECT = ("vamp_direct_0.10", "vamp_direct_0.25")
PARTS = {
    "anchor": Part("unmodified vLLM", ("vllm",), ("vllm",)),
    "upper": Part(
        "unmodified vLLM, a KV pool that holds everything", ("upper_bound",), ("upper_bound",), "upper"
    ),
    "plain": Part(
        "both in one engine: the anchor's pool is the large one with blocks withheld",
        ("vllm", "upper_bound"),
        ("vllm", "upper_bound"),
        "upper",
    ),
    "offload": Part(
        "unmodified vLLM with KV offloading to host", ("vllm_host_kv",), ("vllm_host_kv",), host_kv=True
    ),
    "vamp": Part("VAMP", ("paper", "direct", "auto", "measured", "fixed"), (*_DIRECT, *_PAPER), vamp=True),
    "spill": Part(
        "VAMP with KV offloading to host", ("spill",), ("vamp_spill_0.25",), vamp=True, host_kv=True
    ),
}


@dataclass(frozen=True)
class Machine:
    """What an engine is started with.

    Attributes:
        model: checkpoint folder, or folder of a configuration for random weights.
        layers: layers of the model to keep; 0 for all.
        random_weights: whether there are none to load.
        kv_bytes: KV budget of every arm but the upper bound, with what VAMP stages in and keeps in reserve.
        upper_bytes: KV budget of the upper bound.
        host_kv_gib: host memory for KV offloading.
        max_ratio: largest share of the experts that VAMP has homes for.
        max_model_len, max_num_seqs, max_num_batched_tokens: as in vLLM.
        kernel: VAMP's setting ``moe_kernel``.
        engine: more keyword arguments of vLLM's ``EngineArgs``.
        vamp: more settings of VAMP.
    """

    model: str
    layers: int
    random_weights: bool
    kv_bytes: int
    upper_bytes: int
    host_kv_gib: float
    max_ratio: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kernel: str
    engine: dict[str, Any]
    vamp: dict[str, Any]


def engine_options(part: Part, machine: Machine) -> dict[str, Any]:
    """Keyword arguments of ``EngineArgs``; parts differ in nothing but what is set here."""
    options: dict[str, Any] = {
        "model": machine.model,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "max_model_len": machine.max_model_len,
        "max_num_seqs": machine.max_num_seqs,
        "max_num_batched_tokens": machine.max_num_batched_tokens,
        "kv_cache_memory_bytes": machine.upper_bytes if part.pool == "upper" else machine.kv_bytes,
        "load_format": "dummy" if machine.random_weights else "auto",
        **machine.engine,
    }
    if machine.layers:
        options["hf_overrides"] = {"num_hidden_layers": machine.layers}
    if part.host_kv:
        options["kv_offloading_size"] = machine.host_kv_gib
    if part.vamp:
        chosen = {"max_offload_ratio": machine.max_ratio, "moe_kernel": machine.kernel, **machine.vamp}
        options |= {
            "load_format": "vamp",
            "model_loader_extra_config": {"inner": options["load_format"]},
            "additional_config": {**options.get("additional_config", {}), "vamp": chosen},
        }
    return options


def check_shared_memory(part: Part, machine: Machine, folder: str = "/dev/shm") -> None:
    """Raise ``ConfigError`` where ``folder`` is too small for vLLM's KV offloading, which lies there."""
    if not part.host_kv:
        return
    free = shutil.disk_usage(folder).free / GIB
    if free < machine.host_kv_gib:
        raise ConfigError(
            f"--host-kv-gib {machine.host_kv_gib:g}: {folder} has {free:.1f} GiB free; give less, or first "
            f"`mount -o remount,size={machine.host_kv_gib + 1:.0f}G {folder}`"
        )


def set_environment(part: Part, routing: str, caches: Path) -> None:
    """What vLLM and Triton read from the environment; to be called before either is imported.

    The engine core stays in this process, where its scheduler can be watched and changed. An unmodified
    engine loads no plugin but that of the routing simulation.
    """
    plugins = ["vamp"] if part.vamp else []
    plugins += ["vamp_benchmark_routing"] if routing.startswith("vamp_") else []
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Autotuning takes most of a start; with its results kept, that of the first engine only.
        "TRITON_CACHE_AUTOTUNING": "1",
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ",".join(plugins)}
    if routing:
        fixed["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = routing
    os.environ.update({**defaults, **os.environ, **fixed})
