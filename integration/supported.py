"""Which models VAMP can serve, by what their routed experts are.

It needs every routed expert of a layer as two weights in one shape, bf16, fp16 or fp8 in blocks, that vLLM's
Triton experts (on a CPU, its unquantized ones) read at any stride between experts, chosen by ids that name
the layer's experts. What a configuration tells is checked before anything starts (``refusals.py``, by
``model_rules.py``); the rest on the layers that vLLM has built, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from vamp_integration import model_rules
from vamp_integration.experts import VampRoutedExperts
from vamp_integration.log import logger
from vamp_integration.moe_kernel import misfit
from vamp_integration.plan import slab_geometry
from vamp_integration.settings import VampSettings
from vamp_runtime.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Architectures that a test moves experts of while it compares tokens (tests/support/families.py).
TESTED = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    }
)

#: vLLM's methods whose weights stay as they are in the checkpoint, where their scales are of blocks.
BLOCK_METHODS = ("Fp8MoEMethod", "CompressedTensorsW8A8Fp8MoEMethod")


def refused_architecture(config: VllmConfig) -> str:
    """The architecture and why it cannot be served, or an empty string."""
    model = config.model_config
    if model.using_transformers_backend():
        return f"{model.architectures[0]} through vLLM's Transformers backend"
    return model_rules.refused_architecture(model.architecture)


def refused_quantization(config: VllmConfig) -> str:
    """The quantization that VAMP cannot serve, or an empty string."""
    table = config.model_config.model_arch_config.quantization_config or {}
    device = config.device_config.device_type
    return model_rules.refused_quantization(config.model_config.quantization, table, device)


def routed_experts(model: nn.Module) -> list[VampRoutedExperts]:
    """Layers of routed experts in the order of the model, all of VAMP's class.

    Raises ``ConfigError`` where there are none, or one is of another class.
    """
    found = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    layers = [layer for layer in found if isinstance(layer, VampRoutedExperts)]
    name = type(model).__name__
    if not found:
        raise ConfigError(
            f"model: {name} has no routed experts to offload; serve it without --load-format vamp"
        )
    if len(layers) < len(found):
        others = ", ".join(sorted({type(layer).__name__ for layer in found if layer not in layers}))
        raise _refusal(name, f"its experts are a class of their own, {others}")
    return layers


def check_layers(model: nn.Module, settings: VampSettings) -> None:
    """Refuse a model that VAMP cannot serve, by its layers. No weight need have been read.

    Raises ``ConfigError`` naming the model's class and the reason.
    """
    layers, name = routed_experts(model), type(model).__name__
    on_cpu = layers[0].w13_weight.device.type == "cpu"
    for layer in layers:
        reason = next(_problems(layer), "")
        if reason:
            raise _refusal(name, f"{reason} ({layer.layer_name})")
        check_kernel(layer, getattr(layer.quant_method, "experts_cls", None), on_cpu)
        reason = misfit(layer) if settings.moe_kernel == "vamp" else ""
        if reason:
            raise ConfigError(f"moe_kernel: vamp cannot run {layer.layer_name}: {reason}; use vllm")
    _check_one_shape(layers, name)
    first = layers[0]
    if not on_cpu:  # where vLLM pads them first
        parts: tuple[torch.Tensor, ...] = (first.w13_weight.data, first.w2_weight.data)  # type: ignore[assignment]
        part_bytes = (sum(part[0].nbytes for part in parts),)
        slab_geometry(settings, len(layers), first.local_num_experts, part_bytes, "cuda")
    if name not in TESTED:
        logger.warning("VAMP: %s has the experts that VAMP needs, but no test of VAMP runs it", name)


def check_kernel(layer: RoutedExperts, experts: type | None, on_cpu: bool) -> None:
    """Raise ``ConfigError`` where the class ``experts`` does not read weights where they lie."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    name = experts.__name__ if experts is not None else "no modular kernel"
    if on_cpu:
        usable, needed = experts is not None and issubclass(experts, CPUUnquantizedExperts), "unquantized CPU"
    else:
        usable, needed = name == "TritonExperts", "Triton"
    if not usable:
        remedy = "auto" if on_cpu else "triton"
        raise ConfigError(
            f"moe_backend: {layer.layer_name} runs {name}; VAMP needs vLLM's {needed} experts; use {remedy}"
        )


def _problems(layer: VampRoutedExperts) -> Iterator[str]:
    """Why the layer's experts cannot be moved, most telling first."""
    config, method = layer.moe_config, layer.quant_method
    kind = type(method).__name__
    in_blocks = kind in BLOCK_METHODS and getattr(method, "block_quant", False)
    if kind != "UnquantizedFusedMoEMethod" and not in_blocks:
        yield f"its experts are quantized by {kind}, not in fp8 blocks"
    if config.has_bias:
        yield "its experts have biases"
    if not config.is_act_and_mul:
        yield "its experts have no gate"
    if layer.apply_router_weight_on_input:
        yield "router weights multiply the experts' input"
    if layer.expert_map_manager.num_fused_shared_experts:
        yield "shared experts are fused into the routed ones"
    if config.num_experts != layer.local_num_experts or layer.expert_map is not None:
        yield "its experts are spread over ranks"
    bias = layer.e_score_correction_bias
    if config.num_logical_experts != config.num_experts or (
        bias is not None and len(bias) != config.num_experts
    ):
        yield "tokens may choose experts without weights, or copies of experts"


def _check_one_shape(layers: Sequence[VampRoutedExperts], name: str) -> None:
    shapes = {(layer.local_num_experts, layer.w13_weight.shape, layer.w2_weight.shape) for layer in layers}
    dtypes = {layer.w13_weight.dtype for layer in layers}
    if len(shapes) > 1:
        raise _refusal(name, f"its MoE layers differ in shape ({len(shapes)} shapes)")
    if len(dtypes) > 1:
        raise _refusal(name, f"its MoE layers differ in type ({', '.join(sorted(map(str, dtypes)))})")


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(f"model: {name} cannot be served: {reason}; serve it without --load-format vamp")
