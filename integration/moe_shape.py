"""The routed part of a model as its Hugging Face configuration has it, whatever a family calls the fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# As vLLM reads them (vllm/transformers_utils/model_arch_config_convertor.py, models/transformers/moe.py).
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
# Mixtral and OLMoE have no dense layer to tell the experts' size apart from.
INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")


@dataclass(frozen=True)
class MoEShape:
    """Sizes of the routed experts, unsharded.

    Attributes:
        layers: decoder layers, of which ``moe_layers`` have routed experts.
        top_k: experts of a token.
        intermediate: of one expert.
    """

    layers: int
    moe_layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied with: routed experts, and attention as four square matrices."""
        routed = self.moe_layers * self.top_k * 3 * self.hidden * self.intermediate
        return routed + self.layers * 4 * self.hidden**2


def moe_shape(config: Any) -> MoEShape | None:
    """The shape that ``config`` names, or ``None`` where a size is missing or differs by layer."""
    layers = _size(config, ("num_hidden_layers",))
    experts, top_k = _size(config, EXPERTS), _size(config, TOP_K)
    hidden, intermediate = _size(config, ("hidden_size",)), _size(config, INTERMEDIATE)
    if not (layers and experts and top_k and hidden and intermediate):
        return None
    moe_layers = sum(_is_moe_layer(config, layer) for layer in range(layers))
    return MoEShape(layers, moe_layers, experts, top_k, hidden, intermediate) if moe_layers else None


def expert_count(config: Any) -> int | None:
    """Experts of a layer, where the configuration says."""
    return _size(config, EXPERTS)


def _size(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of ``names`` that is set, where it is one number for all layers."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value if isinstance(value, int) else None
    return None


def _is_moe_layer(config: Any, layer: int) -> bool:
    """As the models decide it: DeepSeek and GLM by the first layers, Qwen by a step and a list."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds:
        return bool(kinds[layer] == "sparse")
    every = getattr(config, "moe_layer_freq", None) or 1
    if isinstance(every, list):
        return bool(every[layer])
    return (
        layer >= (getattr(config, "first_k_dense_replace", None) or 0)
        and layer % every == 0
        and (layer + 1) % (getattr(config, "decoder_sparse_step", None) or 1) == 0
        and layer not in (getattr(config, "mlp_only_layers", None) or ())
    )
