"""Moves the routed experts of a loaded model into the slab.

On a CPU, vLLM's kernel (``vllm/model_executor/layers/fused_moe/experts/cpu_moe.py``) prepacks ``w13`` and
``w2`` after loading, each expert by itself, and ignores the expert stride without an error: the packed bytes
are what is placed, and each of the two gets a dense part of its own. On a GPU both are views of one record
per expert, which the Triton experts (``.../experts/triton_moe.py``) read at any expert stride. One layer's
worth of memory is used twice meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.utils import replace_parameter

from vamp_integration.experts import ExpertRouting, VampRoutedExperts
from vamp_integration.log import logger
from vamp_integration.plan import granularity, slab_geometry
from vamp_integration.record_order import read_order
from vamp_integration.settings import VampSettings
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.cuda import CudaDriver
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
    """Put every routed expert of ``model`` behind slab addresses.

    Raises ``ConfigError`` where the model or its experts cannot be placed.
    """
    layers = [module for module in model.modules() if isinstance(module, VampRoutedExperts)]
    _check(layers)
    first = layers[0]
    device: torch.device = first.w13_weight.data.device  # type: ignore[assignment, union-attr]
    experts = first.local_num_experts
    sizes = tuple(getattr(first, part)[0].nbytes for part in PARTS)
    part_bytes = sizes if device.type == "cpu" else (sum(sizes),)
    geometry = slab_geometry(settings, len(layers), experts, part_bytes, device.type)
    order = read_order(settings.record_order, len(layers), experts)
    driver = _driver(settings, device)
    ledger = PageLedger(geometry.page_bytes)
    slab = ExpertSlab(driver, ledger, geometry, order)
    hits = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)
    for index, layer in enumerate(layers):
        records = None if order is None else torch.tensor(order[index], device=device)
        for name, view in zip(PARTS, _views(slab, index, layer), strict=True):
            view[records if records is not None else slice(None)] = getattr(layer, name).data
            replace_parameter(layer, name, view)
        layer.routing = ExpertRouting(hits[index], records)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next layer's pages need what this layer's tensors gave back
    if device.type == "cpu":
        slab.seal()  # reads every byte; on a GPU that would take longer than loading them
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


def _views(slab: ExpertSlab, index: int, layer: VampRoutedExperts) -> list[torch.Tensor]:
    """``w13`` and ``w2`` of a layer at their places in the slab: dense parts, or strided over records."""
    weights = [getattr(layer, name).data for name in PARTS]
    if slab.geometry.parts == len(PARTS):
        return [
            tensor_at(slab.address(index, part), tuple(weight.shape), weight.dtype, weight.device)
            for part, weight in enumerate(weights)
        ]
    (record_bytes,), offset, views = slab.geometry.part_bytes, 0, []
    for weight in weights:
        strides = (record_bytes // weight.element_size(), weight.shape[2], 1)
        address = slab.address(index, 0) + offset
        views.append(tensor_at(address, tuple(weight.shape), weight.dtype, weight.device, strides))
        offset += weight[0].nbytes
    return views


def _driver(settings: VampSettings, device: torch.device) -> MemoryDriver:
    if device.type == "cpu":
        return HostDriver(granularity=granularity(settings, "cpu"), budgets=_budgets(settings))
    return CudaDriver(device.index or 0, compute_stream=lambda: torch.cuda.current_stream(device).cuda_stream)


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
        experts = getattr(kernel, "fused_experts", None)
        if layer.w13_weight.device.type == "cpu":
            usable, needed = _is_plain_cpu(experts), "vLLM's unquantized CPU experts (no zentorch)"
        else:
            usable, needed = type(experts).__name__ == "TritonExperts", "vLLM's Triton experts"
        if not usable:
            raise ConfigError(
                f"moe_backend: {layer.layer_name} runs {type(experts).__name__}; VAMP needs {needed}; "
                "leave moe_backend at auto"
            )
    shapes = {(layer.local_num_experts, layer.w13_weight.shape, layer.w2_weight.shape) for layer in layers}
    if len(shapes) > 1:
        raise ConfigError(
            f"model: its MoE layers differ in shape ({len(shapes)} shapes); VAMP needs one shape"
        )


def _is_plain_cpu(experts: object) -> bool:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    return isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch
