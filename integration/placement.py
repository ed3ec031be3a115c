"""Moves the routed experts of a loaded model into the slab.

On a CPU, vLLM's kernel (``vllm/model_executor/layers/fused_moe/experts/cpu_moe.py``) prepacks ``w13`` and
``w2`` after loading, each expert by itself, and ignores the expert stride without an error: the packed bytes
are what is placed, and each of the two gets a dense part of its own. On a GPU both are views of one record
per expert, which the Triton experts (``.../experts/triton_moe.py``) read at any expert stride. Layers move in
one by one: a layer's worth of memory is used twice meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.utils import replace_parameter

from vamp_integration.experts import ExpertRouting, VampRoutedExperts
from vamp_integration.home_room import check_homes
from vamp_integration.log import logger
from vamp_integration.memory_driver import open_driver
from vamp_integration.moe_kernel import SlotKernel, SlotTables, misfit
from vamp_integration.plan import slab_geometry, within_budget
from vamp_integration.record_order import read_order
from vamp_integration.settings import VampSettings
from vamp_integration.staged_experts import StagedExperts, unstageable
from vamp_integration.staging import Staging, staging_costs
from vamp_integration.supported import check_kernel, routed_experts
from vamp_kernels.workspace import Workspace
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.driver import MemoryDriver
from vamp_runtime.memory.geometry import STAGING_BUFFERS, SlabGeometry
from vamp_runtime.memory.ledger import PageLedger
from vamp_runtime.memory.slab import ExpertSlab
from vamp_runtime.memory.tensor import tensor_at

PARTS = ("w13_weight", "w2_weight")


@dataclass(frozen=True)
class ExpertMemory:
    """One rank's experts: the driver and ledger that the KV region will share, the slab, the counters.

    Attributes:
        hits: int64 ``[layers, experts]``, tokens routed to each expert since start.
        tables: the slot tables on the device, where VAMP's kernel reads them; vLLM's know none.
        staging: what brings experts to staging slots, where there are any.
    """

    driver: MemoryDriver
    ledger: PageLedger
    slab: ExpertSlab
    hits: torch.Tensor
    tables: SlotTables | None = None
    staging: Staging | None = None

    def update_tables(self) -> None:
        """Let the kernels follow the slab's slot table, for what is queued from now on."""
        for follower in (self.tables, self.staging):
            if follower is not None:
                follower.update()


def place(model: nn.Module, settings: VampSettings, config: Any) -> ExpertMemory:
    """Put every routed expert of ``model`` behind slab addresses.

    ``config`` is the engine's. Raises ``ConfigError`` where the model or its experts cannot be placed.
    """
    layers = routed_experts(model)
    _check(layers, settings)
    settings = within_budget(settings, config.cache_config.kv_cache_memory_bytes)
    settings = dataclasses.replace(settings, moe_kernel=_kernel(layers, settings))
    first = layers[0]
    device: torch.device = first.w13_weight.data.device  # type: ignore[assignment]
    experts = first.local_num_experts
    sizes = tuple(getattr(first, part)[0].nbytes for part in PARTS)
    part_bytes = sizes if device.type == "cpu" else (sum(sizes),)
    geometry = _geometry(settings, layers, part_bytes, device)
    check_homes(settings, geometry, ranks=1)  # the other ranks of this host may already have theirs
    order = read_order(settings.record_order, len(layers), experts)
    driver = open_driver(settings, geometry, device)
    ledger = PageLedger(geometry.page_bytes)
    # VAMP's kernel reads no expert but where the slot table says.
    mirror = settings.moe_kernel != "vamp"
    slab = ExpertSlab(driver, ledger, geometry, order, lazily=True, mirror=mirror)
    counters = torch.zeros(len(layers), 1 + experts, dtype=torch.int64, device=device)
    for index, layer in enumerate(layers):
        slab.back()
        records = None if order is None else torch.tensor(order[index], device=device)
        for name, view in zip(PARTS, _views(slab, index, layer, experts), strict=True):
            _store(getattr(layer, name).data, view, records)
            replace_parameter(layer, name, view)
        if settings.moe_kernel == "vllm":
            reorder_others(layer, experts, records)
            layer.routing = ExpertRouting(counters[index], records)
        if device.type == "cuda":
            # The next layer's pages need what this layer's tensors gave back. The driver's copies run on a
            # stream of its own, which waits for none of torch's.
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    hits, tables, staging = counters[:, 1:], None, None
    if geometry.staging_records:
        staging = _staging(slab, driver, layers, settings, config)
    if settings.moe_kernel == "vamp":
        # Rows of their own, aligned alike: Triton compiles a kernel anew for pointers that are not.
        hits = torch.zeros_like(hits, memory_format=torch.contiguous_format)
        tables = _own_kernel(slab, layers, hits, staging)
    memory = ExpertMemory(driver, ledger, slab, hits, tables, staging)
    if device.type == "cpu":
        slab.seal()  # reads every byte; on a GPU that would take longer than loading them
    slab.refresh_homes(geometry.layers * geometry.home_slots * geometry.group_bytes)
    logger.info(
        "VAMP: %d layers x %d experts of %d KiB, group %d, page %d KiB, %d levels of %d KiB, "
        "homes %d MiB on the host",
        geometry.layers,
        geometry.experts,
        geometry.expert_bytes // 1024,
        geometry.group,
        geometry.page_bytes // 1024,
        geometry.max_level,
        geometry.pages_per_level * geometry.page_bytes // 1024,
        geometry.host_home_bytes >> 20,
    )
    if geometry.peer_homes:
        logger.info(
            "VAMP: homes of %d of %d groups of every layer in another GPU's HBM, %d MiB",
            geometry.peer_homes,
            geometry.home_slots,
            geometry.peer_home_bytes >> 20,
        )
    if geometry.padding_bytes:
        logger.info(
            "VAMP: %d KiB of each are padding to whole pages, %d MiB of HBM from the KV budget",
            geometry.padding_bytes // 1024,
            geometry.layers * geometry.experts * geometry.padding_bytes >> 20,
        )
    logger.info(
        "VAMP: staging %s, %d MiB of HBM from the KV budget: %d experts of a layer twice",
        staging.mode if staging is not None else "off",
        geometry.staging_records * geometry.expert_bytes >> 20,
        geometry.staging_records // STAGING_BUFFERS,
    )
    return memory


def _kernel(layers: Sequence[VampRoutedExperts], settings: VampSettings) -> str:
    """``settings.moe_kernel`` where it says which, else VAMP's if it computes every layer."""
    if settings.moe_kernel != "auto":
        return settings.moe_kernel
    if layers[0].w13_weight.device.type == "cpu":
        return "vllm"
    reason = next(filter(None, map(misfit, layers)), "")
    if reason:
        logger.warning(
            "VAMP: vLLM's MoE kernel computes this model, since %s; moves will hold steps up", reason
        )
    return "vllm" if reason else "vamp"


def _geometry(
    settings: VampSettings,
    layers: Sequence[VampRoutedExperts],
    part_bytes: tuple[int, ...],
    device: torch.device,
) -> SlabGeometry:
    """The slab, without staging where the kernel could not read from it."""
    first, sizes = layers[0], (len(layers), layers[0].local_num_experts, part_bytes, device.type)
    geometry = slab_geometry(settings, *sizes)
    if settings.moe_kernel == "vamp" or not geometry.staging_records:
        return geometry
    reason = unstageable(first, geometry.own_slots, geometry.staging_records)
    if reason and settings.staging == "region":
        raise ConfigError(
            f"staging: region cannot serve {first.layer_name} on vLLM's kernel: {reason}; use auto"
        )
    return slab_geometry(dataclasses.replace(settings, staging="off"), *sizes) if reason else geometry


def _views(slab: ExpertSlab, index: int, layer: VampRoutedExperts, slots: int) -> list[torch.Tensor]:
    """``w13`` and ``w2`` of a layer's first ``slots`` slots: dense parts, or strided over records."""
    weights = [getattr(layer, name).data for name in PARTS]
    if slab.geometry.parts == len(PARTS):
        return [
            tensor_at(slab.address(index, part), (slots, *weight.shape[1:]), weight.dtype, weight.device)
            for part, weight in enumerate(weights)
        ]
    (record_bytes,), offset, views = slab.geometry.part_bytes, 0, []
    for weight in weights:
        strides = (record_bytes // weight.element_size(), weight.shape[2], 1)
        address, shape = slab.address(index, 0) + offset, (slots, *weight.shape[1:])
        views.append(tensor_at(address, shape, weight.dtype, weight.device, strides))
        offset += weight[0].nbytes
    return views


def _store(weight: torch.Tensor, view: torch.Tensor, records: torch.Tensor | None) -> None:
    """Copy each expert to its record. As integers, since torch cannot index every floating-point type."""
    bits = torch.uint8 if weight.element_size() == 1 else torch.int16
    view.view(bits)[records if records is not None else slice(None)] = weight.view(bits)


def reorder_others(layer: nn.Module, experts: int, records: torch.Tensor | None) -> None:
    """Bring the scales ``[experts, ...]`` into record order, in place: vLLM's kernel is given records.

    Args:
        records: ``[experts]``, record of each expert; ``None`` where it is the identity.
    """
    if records is None:
        return
    for name, parameter in layer.named_parameters(recurse=False):
        # Not the router's bias, which the layer may hold beside its own: tokens choose experts, not records.
        own = name.startswith(("w13_", "w2_")) and name not in PARTS
        if own and parameter.dim() and parameter.shape[0] == experts:
            parameter.data[records] = parameter.data.clone()


def _staging(
    slab: ExpertSlab,
    driver: MemoryDriver,
    layers: Sequence[VampRoutedExperts],
    settings: VampSettings,
    config: Any,
) -> Staging:
    """Staging over the slab; vLLM's kernel is given what a staged step needs."""
    first, by_record = layers[0], settings.moe_kernel == "vllm"
    text_config = config.model_config.hf_text_config
    costs = staging_costs(settings, text_config, first, slab.geometry.expert_bytes)
    max_tokens = config.scheduler_config.max_num_batched_tokens
    device: torch.device = first.w13_weight.device  # type: ignore[assignment]
    staging = Staging(slab, driver, device, settings.staging, costs, max_tokens, by_record)
    if by_record:
        for index, layer in enumerate(layers):
            views = _views(slab, index, layer, slab.geometry.home_slot_base)
            layer.staged = StagedExperts(staging, index, *views)
    return staging


def _own_kernel(
    slab: ExpertSlab,
    layers: Sequence[VampRoutedExperts],
    hits: torch.Tensor,
    staging: Staging | None = None,
) -> SlotTables:
    """Give every layer VAMP's kernel; the slot tables that it reads."""
    tables, workspace = SlotTables(slab, hits.device), Workspace(hits.device)
    for index, layer in enumerate(layers):
        w13, w2 = _views(slab, index, layer, slab.geometry.slots)
        w13_scale, w2_scale = (_scale(layer, name) for name in PARTS)
        layer.slot_kernel = SlotKernel(
            w13,
            w2,
            tables.slots[index],
            tables.hosted[index],
            hits[index],
            bool(layer.apply_router_weight_on_input),
            workspace,
            layer.moe_config.in_dtype,
            w13_scale,
            w2_scale,
            staging,
            index,
        )
    return tables


def _scale(layer: VampRoutedExperts, name: str) -> torch.Tensor | None:
    """Scales of a weight by expert, under either name that vLLM's fp8 methods give them."""
    for suffix in ("_scale_inv", "_scale"):
        scale: torch.Tensor | None = getattr(layer, name + suffix, None)
        if scale is not None:
            return scale.data
    return None


def _check(layers: Sequence[VampRoutedExperts], settings: VampSettings) -> None:
    """What is known only once vLLM has prepared the weights; the rest came before they were read."""
    for layer in layers:
        on_cpu = layer.w13_weight.device.type == "cpu"
        experts = getattr(getattr(layer.quant_method, "moe_kernel", None), "fused_experts", None)
        check_kernel(layer, type(experts), on_cpu)
        if on_cpu and getattr(experts, "_use_zentorch", False):
            raise ConfigError(f"moe_backend: {layer.layer_name} runs zentorch; uninstall zentorch")
        reason = misfit(layer) if settings.moe_kernel == "vamp" else ""
        if reason:
            raise ConfigError(f"moe_kernel: vamp cannot run {layer.layer_name}: {reason}; use vllm")
