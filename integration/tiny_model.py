"""A tiny Qwen3-Next with seeded random weights, for machines without a GPU or a model hub.

Real architecture (three linear-attention layers and one full-attention layer, routed experts and a shared
expert), small enough for two cores. The weights are random but not degenerate: the output depends on every
expert and every KV block that was read, so wrong bytes change tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vamp_runtime.errors import ConfigError


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the checkpoint. Expert bytes are ``6 * hidden * intermediate`` (bf16 w13 and w2)."""

    layers: int = 4
    experts: int = 32
    top_k: int = 4
    hidden: int = 256
    intermediate: int = 128
    vocab: int = 2048
    max_positions: int = 32768

    def __post_init__(self) -> None:
        if self.layers % 4:
            raise ConfigError(
                f"layers: {self.layers} is not a multiple of 4 (3 linear, 1 full attention); use 4"
            )
        if not 0 < self.top_k <= self.experts:
            raise ConfigError(f"top_k: {self.top_k} is outside 1..{self.experts} (experts); use 4")
        if self.hidden % 32 or self.intermediate % 32:
            raise ConfigError(
                f"hidden, intermediate: {self.hidden}, {self.intermediate} must be multiples of 32 "
                "for the CPU kernel"
            )


def model_config(shape: TinyShape) -> dict[str, Any]:
    """Keyword arguments of ``transformers.Qwen3NextConfig`` for ``shape``."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": shape.intermediate,
        "shared_expert_intermediate_size": shape.intermediate,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "full_attention_interval": 4,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def write_checkpoint(path: Path, seed: int = 0, shape: TinyShape | None = None) -> Path:
    """Write config and bf16 safetensors to the folder ``path``; the same seed gives the same bytes.

    Raises ``ConfigError`` where ``path`` exists and is not an empty folder.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    shape = shape or TinyShape()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"path: {path} exists and is not an empty folder; name a new one")
    config = Qwen3NextConfig(**model_config(shape), dtype="bfloat16")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3NextForCausalLM(config)  # type: ignore[no-untyped-call]
        _spread(model)
    path.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(path, safe_serialization=True)  # type: ignore[arg-type]
    (path / "vamp_tiny.json").write_text(json.dumps({"seed": seed, **shape.__dict__}) + "\n")
    return path


def _spread(model: Any) -> None:
    """Scale matrices to keep activations of order one: at the default 0.02 the output ignores the experts."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2 or "conv1d" in name:
                continue
            if "embed_tokens" in name:
                weight.normal_(0.0, 1.0)
            else:
                weight.normal_(0.0, weight.shape[-1] ** -0.5 * (2.0 if "mlp.gate" in name else 1.0))
