"""Moves the routed experts of a loaded model into the slab of the host driver (CPU engine).

vLLM's CPU kernel (``vllm/model_executor/layers/fused_moe/experts/cpu_moe.py``) prepacks ``w13`` and ``w2``
after loading, each expert by itself, and ignores the expert stride without an error: so the packed bytes are
what is placed, and each of the two gets a dense part of its own. One layer's worth of memory is used twice
meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.utils import replace_parameter

from vamp_integration.experts import ExpertRouting, VampRoutedExperts
from vamp_integration.log import logger
from vamp_integration.plan import granularity, slab_geometry
from vamp_integration.record_order import read_order
from vamp_integration.settings import VampSettings
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.driver import MemoryDriver, Tier
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.ledger import PageLedger
from vamp_runtime.memory.slab import ExpertSlab
from vamp_runtime.memory.tensor import tensor_at

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
    geometry = slab_geometry(settings, len(layers), experts, part_bytes)
    order = read_order(settings.record_order, len(layers), experts)
    driver = HostDriver(granularity=granularity(settings), budgets=_budgets(settings))
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


def _budgets(settings: VampSettings) -> dict[Tier, int] | None:
    """Limits of the tiers in bytes; ``None`` leaves each at the machine's memory."""
    if not settings.host_gib:
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {Tier.HBM: physical, Tier.HOST: int(settings.host_gib * 2**30)}


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
