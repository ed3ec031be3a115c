"""Tiny configurations of every family of models that VAMP is tested with, as published ones have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vamp_integration.tiny_model import TinyShape


@dataclass(frozen=True)
class Family:
    """How to build one family with ``transformers``.

    Attributes:
        prefix: of the classes ``<prefix>Config`` and ``<prefix>ForCausalLM``.
        fields: keyword arguments of the configuration besides the common ones.
        hybrid: three linear-attention layers and one of full attention, again and again.
        beside_text: of a model that also sees, ``<prefix>ForConditionalGeneration``: what its configuration
            has beside that of the text model.
        written: fields of ``config.json`` that ``transformers`` renames or leaves out.
        fused: whether the checkpoint has one tensor for all experts of a layer, not one for each.
    """

    prefix: str
    fields: Callable[[TinyShape], dict[str, Any]]
    hybrid: bool = False
    beside_text: Callable[[TinyShape], dict[str, Any]] | None = None
    written: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = False

    @property
    def model_class(self) -> str:
        """Name in ``transformers``, and of vLLM's own class."""
        return f"{self.prefix}For{'CausalLM' if self.beside_text is None else 'ConditionalGeneration'}"


def config_fields(family: Family, shape: TinyShape) -> dict[str, Any]:
    """Keyword arguments of the family's configuration class."""
    text = _text_fields(family, shape)
    return text if family.beside_text is None else {"text_config": text, **family.beside_text(shape)}


def _text_fields(family: Family, shape: TinyShape) -> dict[str, Any]:
    heads = max(shape.hidden // 64, 2)
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **family.fields(shape),
    }


def _linear_attention(shape: TinyShape) -> dict[str, Any]:
    return {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "shared_expert_intermediate_size": shape.intermediate,
        **_qwen(shape),
    }


def _qwen3_next(shape: TinyShape) -> dict[str, Any]:
    fields = {"decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 4}
    return {**_linear_attention(shape), **fields}


def _qwen3_5(shape: TinyShape) -> dict[str, Any]:
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(shape.layers)]
    return {**_linear_attention(shape), "layer_types": kinds, "dtype": "bfloat16"}


def _eyes(shape: TinyShape) -> dict[str, Any]:
    """The smallest vision tower, which a server of text alone does not build."""
    vision = {"depth": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {
        "vision_config": {**vision, "out_hidden_size": shape.hidden},
        "tie_word_embeddings": False,
        **{name: shape.vocab - 1 - index for index, name in enumerate(tokens)},
    }


def _qwen(shape: TinyShape) -> dict[str, Any]:
    return {"num_experts": shape.experts, "moe_intermediate_size": shape.intermediate}


def _qwen2_moe(shape: TinyShape) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": shape.intermediate, "intermediate_size": shape.hidden}
    return {**_qwen(shape), **shared, "decoder_sparse_step": 1}


def _qwen3_moe(shape: TinyShape) -> dict[str, Any]:
    fields = {"intermediate_size": shape.hidden, "mlp_only_layers": [], "decoder_sparse_step": 1}
    return {**_qwen(shape), **fields, "head_dim": 64, "norm_topk_prob": True}


def _no_dense_layers(shape: TinyShape) -> dict[str, Any]:
    return {"num_experts": shape.experts, "intermediate_size": shape.intermediate}


def _mixtral(shape: TinyShape) -> dict[str, Any]:
    return {"num_local_experts": shape.experts, "intermediate_size": shape.intermediate, "head_dim": 64}


def _shared(shape: TinyShape) -> dict[str, Any]:
    """One dense layer first, then layers with a shared expert, as GLM and DeepSeek have them."""
    return {
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": shape.intermediate,
        "intermediate_size": shape.hidden,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }


def _glm4_moe(shape: TinyShape) -> dict[str, Any]:
    fields = {"head_dim": 64, "use_qk_norm": True, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    return {**_shared(shape), **fields, "num_nextn_predict_layers": 0}


def _latent_attention(shape: TinyShape) -> dict[str, Any]:
    """The head sizes that vLLM's kernels for latent attention are built for."""
    return {
        **_shared(shape),
        "num_key_value_heads": max(shape.hidden // 64, 2),
        "kv_lora_rank": 512,
        "q_lora_rank": shape.hidden // 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }


def _deepseek_v2(shape: TinyShape) -> dict[str, Any]:
    return {**_latent_attention(shape), "q_lora_rank": None, "topk_method": "greedy"}


def _deepseek_v3(shape: TinyShape) -> dict[str, Any]:
    """Grouped routing with a bias that only chooses, as ``topk_method`` says."""
    return {**_latent_attention(shape), "n_group": 2, "num_nextn_predict_layers": 0}


_V3_ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}

FAMILIES = {
    "deepseek-v2": Family(
        "DeepseekV2", _deepseek_v2, written={"scoring_func": "softmax", "moe_layer_freq": 1}
    ),
    "deepseek-v3": Family("DeepseekV3", _deepseek_v3, written=_V3_ROUTING),
    "glm4-moe": Family("Glm4Moe", _glm4_moe),
    "glm4-moe-lite": Family(
        "Glm4MoeLite", _latent_attention, written={"first_k_dense_replace": 1, **_V3_ROUTING}
    ),
    "mixtral": Family("Mixtral", _mixtral),
    "olmoe": Family("Olmoe", _no_dense_layers),
    "qwen2-moe": Family("Qwen2Moe", _qwen2_moe),
    "qwen3-5-moe": Family("Qwen3_5Moe", _qwen3_5, hybrid=True, beside_text=_eyes, fused=True),
    "qwen3-moe": Family("Qwen3Moe", _qwen3_moe),
    "qwen3-next": Family("Qwen3Next", _qwen3_next, hybrid=True),
}
