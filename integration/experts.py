"""Hook: ``vllm/model_executor/layers/fused_moe/routed_experts.py`` ``RoutedExperts.forward_modular``.

What: counts which experts tokens are routed to, and runs them where they lie: with vLLM's kernel, after
turning expert ids into record ids where the slab keeps experts in another order, or with VAMP's own
(``moe_kernel.py``). Why: levels take the coldest experts, and vLLM's kernels know no slot table.
How: vLLM's out-of-tree registry replaces the class at construction, inside ``use_vamp_experts`` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from vamp_integration.moe_kernel import SlotKernel
from vamp_integration.staged_experts import StagedExperts


class ExpertRouting:
    """One layer's counters and record order. Two launches a call at most: it runs in every layer and step.

    Args:
        hits: int64 ``[1 + experts]``, changed in place: padding, then tokens routed to each expert.
        records: ``[experts]``, record of each expert; ``None`` where it is the identity.
    """

    def __init__(self, hits: torch.Tensor, records: torch.Tensor | None = None) -> None:
        self.hits = hits
        self._one = torch.ones(1, dtype=hits.dtype, device=hits.device)
        self._records = None
        if records is not None:
            padding = torch.full_like(records[:1], -1)
            self._records = torch.cat([padding, records]).int()

    def __call__(self, topk_ids: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Count ``topk_ids`` ``[tokens, top_k]`` and return record ids; -1 (padding) stays -1.

        With ``slots`` ``[experts]`` they are those of the slots that experts are to be read from instead.
        """
        places = (topk_ids + 1).reshape(-1)
        self.hits.index_add_(0, places, self._one.expand(places.shape[0]))
        if slots is not None:
            chosen = slots.index_select(0, topk_ids.clamp(min=0).reshape(-1)).view_as(topk_ids)
            return torch.where(topk_ids < 0, topk_ids, chosen.to(topk_ids.dtype))
        if self._records is None:
            return topk_ids
        return self._records.index_select(0, places).to(topk_ids.dtype).view_as(topk_ids)


class VampRoutedExperts(RoutedExperts):
    """``RoutedExperts`` whose weights lie in a slab. Until they do, it is vLLM's own."""

    routing: ExpertRouting | None = None
    staged: StagedExperts | None = None
    slot_kernel: SlotKernel | None = None

    def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.slot_kernel is not None:
            return self.slot_kernel(x, topk_weights, topk_ids)
        if self.routing is None:
            return super().forward_modular(x, topk_weights, topk_ids, *args, **kwargs)
        if self.staged is None or not self.staged.wanted(x):
            return super().forward_modular(x, topk_weights, self.routing(topk_ids), *args, **kwargs)
        slots = self.routing(topk_ids, self.staged.slots)
        return self.staged.forward(self, x, topk_weights, slots, *args, **kwargs)


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
