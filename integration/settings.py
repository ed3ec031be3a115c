"""What a user sets for VAMP inside vLLM: ``--additional-config '{"vamp": {...}}'``.

Kept apart from vLLM's own options so that an engine without ``--load-format vamp`` is not touched at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vamp_runtime.errors import ConfigError

KEY = "vamp"
LOAD_FORMAT = "vamp"
MOE_KERNELS = ("auto", "vamp", "vllm")
STAGING_MODES = ("auto", "off", "region")
#: A block's pages of all layers side by side, so that the region grows at one end.
GPU_LAYOUT = "BLHNC"


@dataclass(frozen=True)
class VampSettings:
    """One engine's settings.

    Attributes:
        max_offload_ratio: largest share of each layer's experts that may leave HBM, 0..1.
        policy: name or path of a policy profile; ``auto`` takes ``cpu`` on a CPU engine, else ``measured``,
            or ``paper`` where that does not know the model's KV cache.
        hardware: name or path of a hardware profile; ``auto`` takes ``cpu`` on a CPU engine.
        model: name or path of a model profile; ``auto`` takes the one for the architecture.
        granule_kib: page granule of the host driver in KiB; 0 takes the hardware profile's.
        reserve_levels: levels of KV memory kept mapped but out of the block pool, taken from the KV budget.
        host_gib: most host memory for home pages, in GiB; 0 means no limit of VAMP's own.
        peer_hbm_gib: most HBM of one other GPU for home pages, in GiB, where an engine has a single rank, on
            a GPU: those of the warmest of the experts that may leave; 0 keeps all homes on the host.
        home_refresh_mib: most bytes copied to home pages per step, in MiB.
        reselect_mib_per_s: most expert groups, in MiB a second, that come back to HBM in the place of colder
            ones while the level stays; 0 leaves the groups that are out as they are.
        record_order: path of a routing profile (JSON, a permutation per layer); empty means by index.
        restore: whether levels are taken back when the pressure has gone.
        max_bubble_ms: longest time that one move may hold a step up, in milliseconds; at least a level moves.
        prefill_share: while others decode, most of the time that prefill steps may take for reading experts
            on the host: with 0.2, five times as long passes between the begins of two, unless those who wait
            have waited for long together. 1 holds none back.
        max_cordon_s: a restore that cannot empty its blocks within this time is given up, in seconds.
        moe_kernel: ``vamp``, on a GPU, is VAMP's own; ``vllm`` leaves vLLM's kernel, which reads an expert at
            its own address, so that moves hold steps up; ``auto`` takes VAMP's where it computes the layer.
        staging: on a GPU, whether host-backed experts are brought to HBM for the step that reads them:
            ``auto`` by the step's tokens, ``region`` all of them before every layer, ``off`` never.
        staging_mib: most HBM for that, in MiB, taken from the KV budget. Half of it serves a layer: experts
            beyond are read in place. The default holds 8 % of Qwen3-Next's experts in bf16 twice; more than
            the largest level is not taken.
        nvtx: name the phases of a step and the launches of a layer for a profiler.
        exercise_steps: diagnostic: move a level every so many steps, whatever the policy says; 0 is off.
    """

    max_offload_ratio: float = 0.25
    policy: str = "auto"
    hardware: str = "auto"
    model: str = "auto"
    granule_kib: int = 0
    reserve_levels: int = 1
    host_gib: float = 0.0
    peer_hbm_gib: float = 0.0
    home_refresh_mib: int = 64
    reselect_mib_per_s: float = 0.0
    record_order: str = ""
    restore: bool = True
    max_bubble_ms: float = 30.0
    prefill_share: float = 0.2
    max_cordon_s: float = 30.0
    moe_kernel: str = "auto"
    staging: str = "auto"
    staging_mib: int = 512
    nvtx: bool = False
    exercise_steps: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_offload_ratio <= 1.0:
            raise ConfigError(f"max_offload_ratio: {self.max_offload_ratio} is outside 0..1; try 0.25")
        if self.granule_kib < 0 or self.granule_kib % 4:
            raise ConfigError(f"granule_kib: {self.granule_kib} is not a multiple of 4 KiB pages; try 64")
        for name, least in (
            ("reserve_levels", 0),
            ("exercise_steps", 0),
            ("home_refresh_mib", 1),
            ("staging_mib", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)} is below {least}; try {max(least, 1)}")
        for name in ("max_bubble_ms", "max_cordon_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: {getattr(self, name)} is not finite and above 0; try 30")
        if not 0 < self.prefill_share <= 1:
            raise ConfigError(f"prefill_share: {self.prefill_share} is not above 0 and at most 1; try 0.2")
        if self.moe_kernel not in MOE_KERNELS:
            raise ConfigError(f"moe_kernel: {self.moe_kernel!r} is none of {MOE_KERNELS}; try 'auto'")
        if self.staging not in STAGING_MODES:
            raise ConfigError(f"staging: {self.staging!r} is none of {STAGING_MODES}; try 'auto'")
        for name, meaning in (
            ("host_gib", "no limit"),
            ("peer_hbm_gib", "off"),
            ("reselect_mib_per_s", "off"),
        ):
            if not 0 <= getattr(self, name) < math.inf:
                value = getattr(self, name)
                raise ConfigError(f"{name}: {value} is not finite and 0 or more; try 0 ({meaning})")


def parse(values: Mapping[str, Any]) -> VampSettings:
    """Settings from the ``vamp`` table; unknown names and wrong types raise ``ConfigError``."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"additional_config.vamp: {values!r} is not a table; try {{}}")
    fields = {field.name: field for field in dataclasses.fields(VampSettings)}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"additional_config.vamp.{name}: unknown setting; known: {', '.join(fields)}")
        default = fields[name].default
        fits = isinstance(value, bool) if isinstance(default, bool) else _fits(value, type(default))
        if not fits:
            kind = type(default).__name__
            raise ConfigError(
                f"additional_config.vamp.{name}: {value!r} is not of type {kind}; try {default!r}"
            )
    return VampSettings(**values)


def _fits(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) if kind is float else isinstance(value, kind)


def given(additional_config: Any) -> VampSettings:
    """Settings from what ``--additional-config`` holds, before there is an engine configuration."""
    return parse(additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {})


def settled(chosen: VampSettings, vllm_config: Any) -> VampSettings:
    """``chosen``, with what the engine's other options decide."""
    if chosen.staging == "auto" and getattr(vllm_config.kv_transfer_config, "kv_connector", None):
        # With copies of KV blocks in host memory few levels leave: that HBM serves better as KV cache.
        return dataclasses.replace(chosen, staging="off")
    return chosen


def of(vllm_config: Any) -> VampSettings | None:
    """The settings of an engine, or ``None`` where it does not run VAMP."""
    if vllm_config.load_config.load_format != LOAD_FORMAT:
        return None
    return settled(given(vllm_config.additional_config), vllm_config)
