"""vLLM's unquantized Triton experts over a layer's own records and its staging records.

Stands in for ``UnquantizedFusedMoEMethod.forward_native``
(``vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py``) in a step that is staged ahead: the
kernel knows no slot table, but takes any ids for which there are weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import override_config
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

from vamp_integration.staging import Staging

# vllm/model_executor/layers/fused_moe/experts/triton_moe.py: fewer than 1024, in multiples of 32.
MAX_SLOTS = 992


@dataclass(frozen=True)
class StagedExperts:
    """One layer's experts in staged steps.

    Attributes:
        layer: index of the layer in ``staging``.
        w13: ``[own and staging slots, 2 * intermediate, hidden]``.
        w2: ``[own and staging slots, hidden, intermediate]``.
    """

    staging: Staging
    layer: int
    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def slots(self) -> torch.Tensor:
        """int32 ``[experts]``, where to read each expert."""
        return self.staging.slots[self.layer]

    def wanted(self, x: torch.Tensor) -> bool:
        return self.staging.wanted(x.shape[0])

    def forward(
        self,
        experts: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        slots: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> Any:
        """What ``experts.forward_modular`` returns, its experts read at ``slots`` ``[tokens, top_k]``."""
        kernel = experts.quant_method.moe_kernel
        ahead = self.staging.ahead(self.layer, x.shape[0])
        with override_config(self._config(experts, x, slots)), ahead:
            return kernel.apply(
                hidden_states=x,
                w1=self.w13,
                w2=self.w2,
                topk_weights=topk_weights,
                topk_ids=slots,
                activation=experts.activation,
                apply_router_weight_on_input=experts.apply_router_weight_on_input,
                global_num_experts=experts.global_num_experts,
                expert_map=experts.expert_map,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )

    def _config(self, experts: Any, x: torch.Tensor, slots: torch.Tensor) -> dict[str, int]:
        """The launch that an unstaged step has: vLLM chooses by the number of experts that weights hold."""
        chosen = experts.quant_method.moe_kernel.fused_experts.quant_config.config_name(x.dtype)
        sizes = (experts.w13_weight.size(), experts.w2_weight.size())
        config: dict[str, int] = try_get_optimal_moe_config(*sizes, slots.shape[1], chosen, x.shape[0])
        return config


def unstageable(layer: Any, own_slots: int, staging_records: int) -> str:
    """Why vLLM's kernel cannot read this layer from staging slots, for an error; else an empty string."""
    if layer.w13_weight.element_size() == 1:
        return "its experts have scales"
    if own_slots + staging_records > MAX_SLOTS:
        return f"{own_slots} experts and {staging_records} staging slots are over {MAX_SLOTS}"
    return ""
