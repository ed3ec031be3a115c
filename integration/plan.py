"""Checks that need no engine: would this model's experts and this KV budget fit the settings?

Used before anything starts, so that a bad setting costs one line and not a start-up, and again by the worker
with the real sizes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from math import gcd
from types import SimpleNamespace
from typing import Any

from vamp_integration.costs import engine_costs
from vamp_integration.moe_shape import expert_count, moe_shape
from vamp_integration.record_order import read_order
from vamp_integration.settings import VampSettings
from vamp_profiles import HardwareProfile, load_hardware
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.geometry import MAX_GROUP_BYTES, STAGING_BUFFERS, SlabGeometry

BF16_BYTES, FP8_BYTES = 2, 1
# vLLM's CPU kernel pads the intermediate size of a shard to this.
CPU_ALIGNMENT = 32


def hardware_profile(settings: VampSettings, device: str) -> HardwareProfile:
    """The hardware profile of an engine on ``cpu`` or ``cuda``; one for the other raises ``ConfigError``."""
    driver, shipped = ("host", "cpu") if device == "cpu" else ("cuda", "h200")
    profile = load_hardware(shipped if settings.hardware == "auto" else settings.hardware)
    if profile.driver != driver:
        raise ConfigError(
            f"hardware: {settings.hardware} is for the {profile.driver} driver, but this engine runs on "
            f'{device}; use {shipped}, or a profile with driver = "{driver}"'
        )
    return profile


def granularity(settings: VampSettings, device: str) -> int:
    """Bytes of a granule: the user's, else the hardware profile's."""
    return settings.granule_kib * 1024 or hardware_profile(settings, device).granularity.value


def slab_geometry(
    settings: VampSettings, layers: int, experts: int, part_bytes: tuple[int, ...], device: str
) -> SlabGeometry:
    """The slab for these sizes.

    Raises ``ConfigError`` naming the setting where no group is whole pages, staging holds too few experts, or
    the peer not a group of every layer.
    """
    peer_bytes = int(settings.peer_hbm_gib * 2**30)
    try:
        planned = partial(
            SlabGeometry.plan,
            *(layers, experts, part_bytes, granularity(settings, device), settings.max_offload_ratio),
            # At the highest level, the group that is to leave next needs a home too.
            spare_homes=int(settings.reselect_mib_per_s > 0),
            # Views of a record may end short of the next; the CPU engine's parts are dense.
            pad=device != "cpu",
            peer_bytes=peer_bytes,
            # Whether the kernel is VAMP's is not known before the model is there.
            first_stays=device != "cpu" and settings.moe_kernel != "vllm",
        )
        geometry = planned()
        if device == "cpu":
            return geometry
        if peer_bytes and geometry.home_slots and not geometry.peer_homes:
            raise ConfigError(_peer_too_small(settings, geometry))
        return planned(staging_records=staging_records(settings, geometry))
    except ConfigError as error:
        if str(error).startswith(("staging_mib", "peer_hbm_gib")):
            raise
        common = gcd(*part_bytes)
        fit = (common & -common) // 1024
        if sum(part_bytes) > MAX_GROUP_BYTES or fit < 4:
            raise
        raise ConfigError(
            f"granule_kib: {granularity(settings, device) / 1024:g}: no group of up to 8 experts is whole "
            f"pages (an expert is {' + '.join(str(part) for part in part_bytes)} bytes); try {fit}"
        ) from error


def _peer_too_small(settings: VampSettings, geometry: SlabGeometry) -> str:
    least = math.ceil(geometry.layers * geometry.group_bytes / 2**30 * 100) / 100
    return (
        f"peer_hbm_gib: {settings.peer_hbm_gib:g} holds no expert group of each of {geometry.layers} layers; "
        f"use 0, or at least {least:g}"
    )


def within_budget(settings: VampSettings, kv_bytes: int | None) -> VampSettings:
    """Where staging is ``auto``, no more of it than a quarter of the KV budget, as far as that is known."""
    if kv_bytes is None or settings.staging != "auto":
        return settings
    return replace(settings, staging_mib=min(settings.staging_mib, kv_bytes >> 22))


def staging_records(settings: VampSettings, geometry: SlabGeometry) -> int:
    """Records of two buffers, each of at most the experts of a layer that may be on the host."""
    if settings.staging == "off":
        return 0
    twice = STAGING_BUFFERS * geometry.group_bytes
    most = min(geometry.max_level, geometry.host_homes)
    groups = min((settings.staging_mib << 20) // twice, most)
    if settings.staging == "region" and groups < most:
        raise ConfigError(
            f"staging_mib: {settings.staging_mib} holds {groups * geometry.group} experts twice, but "
            f"staging=region copies up to {most * geometry.group}; use "
            f"{-(-most * twice >> 20)}, or a lower max_offload_ratio"
        )
    return STAGING_BUFFERS * groups * geometry.group


def staging_share(settings: VampSettings, geometry: SlabGeometry, kv_bytes: int) -> int:
    """Bytes of the KV budget ``kv_bytes`` that go to staging, and to padding of the slab.

    Raises ``ConfigError`` where they would be more than half of it.
    """
    extra = geometry.extra_hbm_bytes
    if 2 * extra > kv_bytes:
        raise ConfigError(
            f"staging_mib: {settings.staging_mib} takes {extra} of the {kv_bytes} bytes of "
            f"kv_cache_memory_bytes; use {kv_bytes >> 21}, or a larger KV cache"
        )
    return extra


def reserve_pages(settings: VampSettings, geometry: SlabGeometry, kv_bytes: int) -> int:
    """Pages of the KV budget that stay out of the block pool.

    Raises ``ConfigError`` where they would be more than half of it.
    """
    level_bytes = geometry.pages_per_level * geometry.page_bytes
    levels = settings.reserve_levels if geometry.max_level else 0
    if 2 * levels * level_bytes > kv_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes: {kv_bytes} is too small for a reserve of {levels} level(s) of "
            f"{level_bytes} bytes; give at least {2 * levels * level_bytes}"
        )
    return levels * geometry.pages_per_level


def check_plan(
    settings: VampSettings,
    hf_config: Any,
    tensor_parallel: int,
    kv_bytes: int | None,
    device: str = "cpu",
    quantization: str | None = None,
) -> SlabGeometry | None:
    """Check what the model's configuration already tells; sizes it does not name are left to the worker.

    Args:
        hf_config: attributes of the text model's configuration, or a whole ``config.json``.
        kv_bytes: the KV budget, where it is set.
        device: ``cpu`` or ``cuda``.
        quantization: vLLM's name of the checkpoint's method, where it has one and ``hf_config`` is not whole.

    Returns:
        The slab of a rank, as far as the configuration tells; ``None`` where it does not name the sizes.

    Raises:
        ConfigError, ProfileError: in one line, the setting, its value and what would work.
    """
    # The text model's own table, where the checkpoint has others beside it.
    settings, config = within_budget(settings, kv_bytes), hf_config
    if isinstance(hf_config, dict):
        config = SimpleNamespace(**hf_config.get("text_config", hf_config))
        quantization = (hf_config.get("quantization_config") or {}).get("quant_method")
    engine_costs(settings, config, device == "cpu")
    if device == "cpu" and settings.moe_kernel == "vamp":
        raise ConfigError(f"moe_kernel: {settings.moe_kernel} needs a GPU; use vllm")
    if device == "cpu" and settings.staging == "region":
        raise ConfigError("staging: region needs a GPU; use auto")
    if device == "cpu" and settings.peer_hbm_gib:
        raise ConfigError(f"peer_hbm_gib: {settings.peer_hbm_gib:g} needs a GPU; use 0")
    if settings.peer_hbm_gib and tensor_parallel > 1:
        raise ConfigError(
            f"peer_hbm_gib: {settings.peer_hbm_gib:g} needs a GPU that no rank is on, and VAMP looks for one "
            "with tensor_parallel_size=1 only; use 0"
        )
    if device == "cpu" and settings.nvtx:
        raise ConfigError("nvtx: true needs a GPU; use false")
    read_order(settings.record_order, None, expert_count(config))
    granularity(settings, device)
    shape = moe_shape(config)
    if shape is None:
        return None
    if device != "cpu":
        weights = 3 * (shape.intermediate // tensor_parallel) * shape.hidden
        part_bytes: tuple[int, ...] = (weights * (BF16_BYTES if quantization is None else FP8_BYTES),)
    else:
        shard = -(-shape.intermediate // tensor_parallel // CPU_ALIGNMENT) * CPU_ALIGNMENT
        part_bytes = (2 * shard * shape.hidden * BF16_BYTES, shard * shape.hidden * BF16_BYTES)
    geometry = slab_geometry(settings, shape.moe_layers, shape.experts, part_bytes, device)
    if kv_bytes is not None:
        reserve_pages(settings, geometry, kv_bytes - staging_share(settings, geometry, kv_bytes))
    return geometry
