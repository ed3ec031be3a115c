"""Which models VAMP refuses by their configuration, and in which words.

On plain values, so that the check of an engine (``refusals.py``, ``supported.py``) and ``vamp doctor``, which
has a ``config.json`` and no vLLM, say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vamp_integration.moe_shape import EXPERTS
from vamp_runtime.errors import ConfigError


class Refusal(NamedTuple):
    """Why some values of ``setting`` (as the user writes it) are refused, and what to do instead."""

    setting: str
    reason: str
    remedy: str

    def message(self, value: object) -> str:
        """The one-line complaint about ``value``."""
        text = f"{self.setting}: {value} does not work with VAMP: {self.reason}; {self.remedy}"
        return " ".join(text.split())


NO_EXPERTS = Refusal(
    "--model",
    "there are no experts to move",
    "serve it without VAMP, or serve a mixture-of-experts model",
)
ARCHITECTURE = Refusal(
    "--model",
    "it moves experts that are gated, without biases and of one shape, built by vLLM's own model",
    "serve it without VAMP",
)
QUANTIZATION = Refusal(
    "--quantization",
    "it moves experts in bf16, fp16 or, on a GPU, fp8 in blocks",
    "serve such a checkpoint of the model, or this one without VAMP",
)

#: Architectures whose layers would be refused later, once they are built.
REFUSED = {
    "DbrxForCausalLM": "experts in a class of their own",
    "DeepseekV41ForCausalLM": "experts quantized to mxfp4",
    "DeepseekV4ForCausalLM": "experts quantized to mxfp4",
    "DeepseekV4ForConditionalGeneration": "experts quantized to mxfp4",
    "Ernie4_5_VLMoeForConditionalGeneration": "text and vision experts of two shapes",
    "GptOssForCausalLM": "experts with biases",
    "Llama4ForCausalLM": "router weights on the experts' input",
    "Llama4ForConditionalGeneration": "router weights on the experts' input",
    "LongcatFlashForCausalLM": "experts without weights",
    "LongcatFlashNgramForCausalLM": "experts without weights",
    "NemotronHForCausalLM": "experts without a gate",
    "NemotronHPuzzleForCausalLM": "experts without a gate",
}


def refused_experts(is_moe: bool) -> str:
    """What a model without routed experts is, or an empty string."""
    return "" if is_moe else "a model without routed experts"


def refused_architecture(name: str) -> str:
    """The architecture and why it cannot be served, or an empty string."""
    reason = REFUSED.get(name)
    return f"{name} ({reason})" if reason else ""


def refused_quantization(name: str | None, table: Mapping[str, Any], device: str) -> str:
    """The quantization that VAMP cannot serve, or an empty string.

    Args:
        name: of the method; ``None`` for an unquantized model.
        table: ``quantization_config`` of the checkpoint.
        device: ``cpu`` or ``cuda``.
    """
    if name is None:
        return ""
    if device == "cpu":
        return f"{name} on a CPU"
    blocks = table.get("weight_block_size") if name == "fp8" else _compressed_blocks(name, table)
    if blocks:
        return ""
    return f"{name} without weight_block_size" if name == "fp8" else name


def _compressed_blocks(name: str, table: Mapping[str, Any]) -> bool:
    """Whether a compressed-tensors checkpoint has fp8 weights in blocks and nothing else."""
    groups = table.get("config_groups")
    if name != "compressed-tensors" or not isinstance(groups, dict) or not groups:
        return False
    weights = [group.get("weights") or {} for group in groups.values()]
    return all(
        weight.get("type") == "float" and weight.get("num_bits") == 8 and weight.get("strategy") == "block"
        for weight in weights
    )


def check_model(config: Mapping[str, Any], device: str) -> None:
    """Refuse the model of a whole ``config.json``, as far as that tells.

    Raises ``ConfigError``, one line in the engine's words.
    """
    for refusal, value in _refusals(config, device):
        if value:
            raise ConfigError(refusal.message(value))


def _refusals(config: Mapping[str, Any], device: str) -> Iterator[tuple[Refusal, str]]:
    """In the order of the engine's rules."""
    architectures = config.get("architectures") or [""]
    yield NO_EXPERTS, refused_experts(_names_experts(config))
    yield ARCHITECTURE, refused_architecture(str(architectures[0]))
    yield QUANTIZATION, refused_quantization(*quantization(config), device)


def _names_experts(value: object) -> bool:
    """Whether a count of experts is named anywhere: families nest it under various keys, or by layer."""
    if isinstance(value, Mapping):
        return any(value.get(name) for name in EXPERTS) or any(map(_names_experts, value.values()))
    return isinstance(value, list) and any(map(_names_experts, value))


def quantization(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """vLLM's name of the method that a ``config.json`` names, and its table; ``None`` where it has none."""
    text = config.get("text_config") or {}
    tables = (
        part.get(key) for part in (config, text) for key in ("quantization_config", "compression_config")
    )
    table = next((found for found in tables if isinstance(found, dict) and found), {})
    # Older checkpoints of ModelOpt name their producer instead of a method.
    producer = (table.get("producer") or {}).get("name", "")
    method = (
        str(table.get("quant_method") or producer).lower().replace("compressed_tensors", "compressed-tensors")
    )
    return method or None, table
