"""Moves the routed experts of a loaded model into the slab of the host driver (CPU engine).

vLLM's CPU kernel (``vllm/model_executor/layers/fused_moe/experts/cpu_moe.py``) prepacks ``w13`` and ``w2``
after loading, each expert by itself, and ignores the expert stride without an error: so the packed bytes are
what is placed, and each of the two gets a dense part of its own. One layer's worth of memory is used twice
meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.utils import replace_parameter

from vamp_integration.experts import ExpertRouting, VampRoutedExperts
from vamp_integration.settings import VampSettings
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.driver import MemoryDriver, Tier
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.ledger import PageLedger
from vamp_runtime.memory.slab import ExpertSlab
from vamp_runtime.memory.tensor import tensor_at

logger = init_logger(__name__)

PARTS = ("w13_weight", "w2_weight")


@dataclass(frozen=True)
class ExpertMemory:
    """One rank's experts: the driver and ledger that the KV region will share, the slab, the counters.

    Attributes:
        hits: int64 ``[layers, experts]``, tokens routed to each expert since start.
    """

    driver: MemoryDriver
    ledger: PageLedger
    slab: ExpertSlab
    hits: torch.Tensor


def place(model: nn.Module, settings: VampSettings) -> ExpertMemory:
    """Put every routed expert of ``model`` behind slab addresses and seal the slab.

    Raises ``ConfigError`` where the model or its experts cannot be placed.
    """
    layers = [module for module in model.modules() if isinstance(module, VampRoutedExperts)]
    _check(layers)
    first = layers[0]
    experts = first.local_num_experts
    part_bytes = tuple(getattr(first, part)[0].nbytes for part in PARTS)
    granule = settings.granule_kib * 1024
    geometry = SlabGeometry.plan(len(layers), experts, part_bytes, granule, settings.max_offload_ratio)
    order = read_order(settings.record_order, len(layers), experts)
    budgets = {Tier.HOST: int(settings.host_gib * 2**30)} if settings.host_gib else None
    driver = HostDriver(granularity=granule, budgets=budgets)
    ledger = PageLedger(geometry.page_bytes)
    slab = ExpertSlab(driver, ledger, geometry, order)
    hits = torch.zeros(len(layers), experts, dtype=torch.int64)
    for index, layer in enumerate(layers):
        records = None if order is None else torch.tensor(order[index])
        for part, name in enumerate(PARTS):
            packed = getattr(layer, name).data
            view = tensor_at(slab.address(index, part), tuple(packed.shape), packed.dtype, packed.device)
            view[records if records is not None else slice(None)] = packed
            replace_parameter(layer, name, view)
        layer.routing = ExpertRouting(hits[index], records)
    slab.seal()
    slab.refresh_homes(geometry.layers * geometry.home_slots * geometry.group * sum(part_bytes))
    logger.info(
        "VAMP: %d layers x %d experts of %d KiB, group %d, page %d KiB, %d levels of %d KiB, homes %d MiB",
        geometry.layers,
        geometry.experts,
        sum(part_bytes) // 1024,
        geometry.group,
        geometry.page_bytes // 1024,
        geometry.max_level,
        geometry.pages_per_level * geometry.page_bytes // 1024,
        geometry.max_level * geometry.pages_per_level * geometry.page_bytes >> 20,
    )
    return ExpertMemory(driver, ledger, slab, hits)


def _check(layers: Sequence[VampRoutedExperts]) -> None:
    if not layers:
        raise ConfigError("model: it has no routed experts to offload; serve it without --load-format vamp")
    for layer in layers:
        kernel = getattr(layer.quant_method, "moe_kernel", None)
        kernel_experts = getattr(kernel, "fused_experts", None)
        if not isinstance(kernel_experts, CPUUnquantizedExperts) or kernel_experts._use_zentorch:
            raise ConfigError(
                f"moe_backend: {layer.layer_name} runs {type(kernel_experts).__name__}; "
                "VAMP on a CPU needs vLLM's unquantized CPU experts (moe_backend auto, no zentorch)"
            )
    shapes = {(layer.local_num_experts, layer.w13_weight.shape, layer.w2_weight.shape) for layer in layers}
    if len(shapes) > 1:
        raise ConfigError(
            f"model: its MoE layers differ in shape ({len(shapes)} shapes); VAMP needs one shape"
        )


def read_order(path: str, layers: int, experts: int) -> list[list[int]] | None:
    """The record order of a routing profile: JSON ``{"order": [[record of expert 0, ...] per layer]}``.

    ``None`` for an empty ``path``. Raises ``ConfigError`` naming file and field.
    """
    if not path:
        return None
    by_index = "leave it empty to place experts by index"
    try:
        profile = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        # ValueError: no UTF-8, or no JSON.
        raise ConfigError(
            f"record_order: {path}: cannot be read as a routing profile ({error}); {by_index}"
        ) from None
    order = profile.get("order") if isinstance(profile, dict) else None
    if not isinstance(order, list) or len(order) != layers:
        raise ConfigError(
            f"record_order: {path}: order: has not one permutation for each of {layers} MoE layers; "
            f"{by_index}"
        )
    for index, row in enumerate(order):
        if not _is_permutation(row, experts):
            raise ConfigError(
                f"record_order: {path}: order[{index}] is not a permutation of 0..{experts - 1}; {by_index}"
            )
    return order


def _is_permutation(row: object, experts: int) -> bool:
    if not isinstance(row, list) or any(type(record) is not int for record in row):
        return False
    return sorted(row) == list(range(experts))
