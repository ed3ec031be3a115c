"""Hook: vLLM's KV cache lies in the KV region (``vllm/v1/worker/utils.py`` ``allocate_kv_cache``).

What: answers the one ``torch.zeros(size, int8)`` of the KV allocation with a view of the region, whose size
is virtual. Why: blocks must appear later behind addresses that views and kernels already hold. How: vLLM
wraps that allocation in a context of the worker's choice; ours is a ``TorchFunctionMode``. It goes when vLLM
takes a buffer from outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.geometry import KVGeometry


class KVBuffer(TorchFunctionMode):
    """Inside it, the allocation of exactly ``buffer``'s size in int8 returns ``buffer``; all else passes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.buffer = buffer
        self.taken = 0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.zeros
            and kwargs.get("dtype") is torch.int8
            and _elements(args) == self.buffer.nbytes
        ):
            self.taken += 1
            return self.buffer
        return func(*args, **kwargs)


def _elements(args: Sequence[Any]) -> int:
    sizes = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
    return prod(sizes)


def virtual_config(vllm_config: VllmConfig, config: KVCacheConfig, num_blocks: int) -> KVCacheConfig:
    """``config`` as vLLM's own planner lays it out for ``num_blocks`` blocks; the given one is untouched."""
    planned = _planned(vllm_config, config.kv_cache_groups, num_blocks)
    assert planned.num_blocks == num_blocks
    return dataclasses.replace(config, num_blocks=num_blocks, kv_cache_tensors=planned.kv_cache_tensors)


def tails(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> int:
    """Positions of the cache that vLLM will plan for these layers; each grows at a tail of its own."""
    return layout(_planned(vllm_config, get_kv_cache_groups(vllm_config, dict(specs)), 1))[0]


def _planned(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec], num_blocks: int) -> KVCacheConfig:
    cache = vllm_config.cache_config
    saved, cache.num_gpu_blocks_override = cache.num_gpu_blocks_override, num_blocks
    try:
        return get_kv_cache_config_from_groups(vllm_config, groups, available_memory=0)
    finally:
        cache.num_gpu_blocks_override = saved


def layout(config: KVCacheConfig) -> tuple[int, int]:
    """``(positions, block_stride)`` in bytes: each of ``positions`` holds one page of every block.

    One position, where a block's pages of all layers lie together (vLLM's layout BLHNC).
    Raises ``ConfigError`` for layouts whose layers differ in page size.
    """
    strides = {(tensor.block_stride, tensor.layer_stride) for tensor in config.kv_cache_tensors}
    size = config.kv_cache_tensors[0].size
    if {block for block, _ in strides} == {size // config.num_blocks}:
        return 1, size // config.num_blocks
    if len(strides) == 1:
        block_stride, layer_stride = strides.pop()
        if layer_stride == config.num_blocks * block_stride and size % layer_stride == 0:
            return size // layer_stride, block_stride
    raise ConfigError("model: its KV layers differ in page size; VAMP needs one page size")


def region_geometry(config: KVCacheConfig, page_bytes: int, max_pages: int) -> KVGeometry:
    """Address layout with room for every block that ``max_pages`` pages can back."""
    positions, block_stride = layout(config)
    # Rounded up: a last block that is never backed whole still gives the last pages their addresses.
    blocks = -(-(-(-max_pages // positions) * page_bytes) // block_stride)
    # Every position must start on a page.
    step = page_bytes // gcd(page_bytes, block_stride)
    blocks = -(-max(blocks, config.num_blocks) // step) * step
    return KVGeometry(positions, block_stride, blocks * block_stride, blocks, page_bytes)
