"""Turns a tiny checkpoint's routed experts into fp8 in blocks of 128 by 128, as published ones have them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BLOCK = 128
#: Methods of vLLM, with the name that each gives a weight's scales.
SCALE_SUFFIX = {"fp8": "_scale_inv", "compressed-tensors": "_scale"}

_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")


def quantize_experts(path: Path, method: str) -> None:
    """Rewrite weights and ``config.json`` of the checkpoint in the folder ``path``.

    Everything but the routed experts stays as it is and is named as not quantized.

    Args:
        method: ``fp8``, as the models' own publishers write it, or ``compressed-tensors``.
    """
    from safetensors.torch import load_file, save_file

    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    kept = [
        name.removesuffix(".weight")
        for name, weight in weights.items()
        if weight.dim() == 2 and "embed_tokens" not in name and not _EXPERT.search(name)
    ]
    for name in [name for name in weights if _EXPERT.search(name)]:
        weights[name], weights[name + SCALE_SUFFIX[method]] = in_blocks(weights[name])
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = _table(method, kept)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn ``[n, k]`` and float32 scales ``[n / 128, k / 128]``, whose product is about ``weight``.

    Sizes that are not whole blocks end in a smaller one.
    """
    import torch

    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    most = torch.finfo(torch.float8_e4m3fn).max
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-6) / most
    scaled = (blocks / scales[:, None, :, None]).view_as(padded)
    return scaled[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scales


def _table(method: str, kept: list[str]) -> dict[str, Any]:
    if method == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "block", "block_structure": [BLOCK, BLOCK], "dynamic": False},
        "input_activations": {**common, "strategy": "group", "group_size": BLOCK, "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
    }
