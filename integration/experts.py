"""Hook: ``vllm/model_executor/layers/fused_moe/routed_experts.py`` ``RoutedExperts.forward_modular``.

What: counts which experts tokens are routed to, and turns expert ids into record ids where the slab keeps
experts in another order. Why: levels take the coldest experts, and vLLM's kernels know no slot table.
How: vLLM's out-of-tree registry replaces the class at construction, inside ``use_vamp_experts`` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


@dataclass
class ExpertRouting:
    """One layer's counters and record order.

    Attributes:
        hits: int64 ``[experts]``, tokens routed to each expert since start.
        order: int ``[experts]``, record of each expert; ``None`` where it is the identity.
    """

    hits: torch.Tensor
    order: torch.Tensor | None = None

    def __call__(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Count ``topk_ids`` ``[tokens, top_k]`` and return record ids; -1 (padding) stays -1, uncounted."""
        ids = topk_ids.reshape(-1).long()
        real = ids >= 0
        self.hits.scatter_add_(0, ids.clamp(min=0), real.to(self.hits.dtype))
        if self.order is None:
            return topk_ids
        records = self.order[ids.clamp(min=0)].to(topk_ids.dtype).view_as(topk_ids)
        return torch.where(topk_ids >= 0, records, topk_ids)


class VampRoutedExperts(RoutedExperts):
    """``RoutedExperts`` whose weights lie in a slab. Until ``routing`` is set it is vLLM's own."""

    routing: ExpertRouting | None = None

    def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.routing is not None:
            topk_ids = self.routing(topk_ids)
        return super().forward_modular(x, topk_weights, topk_ids, *args, **kwargs)


@contextmanager
def use_vamp_experts() -> Iterator[None]:
    """Build ``RoutedExperts`` as ``VampRoutedExperts`` inside the block."""
    name = RoutedExperts.__name__
    assert name not in op_registry_oot, f"another plugin replaces {name}"
    PluggableLayer.register_oot(VampRoutedExperts, name=name)
    try:
        yield
    finally:
        del op_registry_oot[name]
