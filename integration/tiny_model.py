"""Tiny mixture-of-experts models with seeded random weights, for machines without a GPU or a model hub.

Real architectures (``tiny_families.py``), by default Qwen3-Next: three linear-attention layers and one
full-attention layer, routed experts and a shared expert. Small enough for two cores. The weights are random
but not degenerate: the output depends on every expert and every KV block that was read, so wrong bytes change
tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vamp_integration.tiny_families import FAMILIES, Family, config_fields
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
        if self.layers < 2:
            raise ConfigError(f"layers: {self.layers} is below 2 (the first may be dense); use 4")
        if not 0 < self.top_k <= self.experts:
            raise ConfigError(f"top_k: {self.top_k} is outside 1..{self.experts} (experts); use 4")
        if self.hidden % 32 or self.intermediate % 32:
            raise ConfigError(
                f"hidden, intermediate: {self.hidden}, {self.intermediate} must be multiples of 32 "
                "for the CPU kernel"
            )


def write_checkpoint(
    path: Path,
    seed: int = 0,
    shape: TinyShape | None = None,
    family: str = "qwen3-next",
    quantization: str = "",
) -> Path:
    """Write config and safetensors to the folder ``path``; the same seed gives the same bytes.

    Args:
        family: one of ``FAMILIES``.
        quantization: ``fp8`` or ``compressed-tensors`` (routed experts in blocks); empty is bf16.

    Raises ``ConfigError`` where ``path`` exists and is not an empty folder, or the family is not known or
    does not come in this shape.
    """
    import torch
    import transformers

    shape = shape or TinyShape()
    kind = _family(family, shape)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"path: {path} exists and is not an empty folder; name a new one")
    config = getattr(transformers, f"{kind.prefix}Config")(**config_fields(kind, shape), dtype="bfloat16")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, kind.model_class)(config)
        _spread(model)
    path.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(
        path, safe_serialization=True, save_original_format=not kind.fused
    )
    _complete(path / "config.json", kind, shape)
    (path / "vamp_tiny.json").write_text(
        json.dumps({"seed": seed, "family": family, **shape.__dict__}) + "\n"
    )
    if quantization:
        from vamp_integration.tiny_fp8 import quantize_experts

        quantize_experts(path, quantization)
    return path


def _family(name: str, shape: TinyShape) -> Family:
    if name not in FAMILIES:
        raise ConfigError(f"family: {name} is not known; use one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if family.hybrid and shape.layers % 4:
        raise ConfigError(
            f"layers: {shape.layers} is not a multiple of 4 (3 linear, 1 full attention); use 4"
        )
    return family


def _complete(file: Path, family: Family, shape: TinyShape) -> None:
    """Give ``config.json`` the fields of published checkpoints that ``transformers`` does not write."""
    config = json.loads(file.read_text())
    if "num_experts" in config_fields(family, shape):
        config.pop("num_local_experts", None)
        config["num_experts"] = shape.experts
    file.write_text(json.dumps({**config, **family.written}, indent=2) + "\n")


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
                router = re.search(r"\.gate\.weight$", name)
                weight.normal_(0.0, weight.shape[-1] ** -0.5 * (2.0 if router else 1.0))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.normal_(0.0, 0.2)
