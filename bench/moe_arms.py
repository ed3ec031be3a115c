"""What is timed side by side, over the same inputs and weights: our layer, vLLM's fused experts, torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from moe_cases import BLOCK, FP8, Shape, Step, Weights

from vamp_kernels.fused_moe import fused_moe, fused_moe_torch
from vamp_kernels.workspace import Workspace

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Arm:
    """One way to compute the layer.

    Attributes:
        calls: from shape, weights and steps, a call for each step.
        comparable: whether the result is the layer's.
        captured: whether its calls can be captured in a CUDA graph.
        dtypes: of weights that it takes.
        most_tokens: beyond which it is left out.
    """

    calls: Callable[[Shape, Weights, list[Step]], list[Call]]
    comparable: bool = True
    captured: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, FP8)
    most_tokens: int = 1 << 30


def scale_arguments(weights: Weights, layer: int) -> dict[str, torch.Tensor]:
    """The arguments of ``fused_moe`` that fp8 weights need."""
    if weights.scales is None:
        return {}
    return dict(zip(("w13_scale", "w2_scale"), weights.scales[layer], strict=True))


def vamp(shape: Shape, weights: Weights, steps: list[Step]) -> list[Call]:
    """Our layer through its slot table, counting hits, with a workspace; told which experts lie in the host's
    memory where the weights say so."""
    device = steps[0].hidden_states.device
    workspace = Workspace(device)
    hits = torch.zeros(shape.experts, dtype=torch.int32, device=device)
    out = torch.empty_like(steps[0].hidden_states)

    def call(step: Step, layer: int) -> torch.Tensor:
        more: dict[str, Any] = scale_arguments(weights, layer)
        if weights.host_experts is not None and weights.staging_slots is not None:
            more["host_experts"] = weights.host_experts[layer]
            more["staging_slots"] = weights.staging_slots[layer]
        return fused_moe(
            step.hidden_states,
            weights.w13,
            weights.w2,
            step.topk_weights,
            step.topk_ids,
            weights.slots[layer],
            out=out,
            hits=hits,
            workspace=workspace,
            **more,
        )

    return [lambda i=i, step=step: call(step, i % weights.layers) for i, step in enumerate(steps)]


def vamp_no_table(shape: Shape, weights: Weights, steps: list[Step]) -> list[Call]:
    """The same kernels without a slot table or anything about residency: experts in their own slots."""
    device = steps[0].hidden_states.device
    workspace = Workspace(device)
    hits = torch.zeros(shape.experts, dtype=torch.int32, device=device)
    out = torch.empty_like(steps[0].hidden_states)
    layers = [weights.layer(i) for i in range(weights.layers)]

    def call(step: Step, layer: int) -> torch.Tensor:
        more: dict[str, Any] = scale_arguments(weights, layer)
        return fused_moe(
            step.hidden_states,
            *layers[layer],
            step.topk_weights,
            step.topk_ids,
            out=out,
            hits=hits,
            workspace=workspace,
            **more,
        )

    return [lambda i=i, step=step: call(step, i % weights.layers) for i, step in enumerate(steps)]


def vllm(shape: Shape, weights: Weights, steps: list[Step]) -> list[Call]:
    """vLLM's Triton experts over the same records (``vllm/model_executor/layers/fused_moe/fused_moe.py``)."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    config = VllmConfig()
    quantised: list[Any] = [None] * weights.layers
    for i, (w13_scale, w2_scale) in enumerate(weights.scales or ()):
        quantised[i] = fp8_w8a8_moe_quant_config(w13_scale, w2_scale, block_shape=[BLOCK, BLOCK])
    layers = [weights.layer(i) for i in range(weights.layers)]

    def call(step: Step, layer: int) -> torch.Tensor:
        with set_current_vllm_config(config):
            return fused_experts(
                step.hidden_states,
                *layers[layer],
                step.topk_weights,
                step.topk_ids,
                quant_config=quantised[layer],
            )

    return [lambda i=i, step=step: call(step, i % weights.layers) for i, step in enumerate(steps)]


def torch_grouped_mm(shape: Shape, weights: Weights, steps: list[Step]) -> list[Call]:
    """``torch._grouped_mm`` on rows that are sorted and gathered beforehand, no combine: a lower bound."""

    def call(x: torch.Tensor, ends: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        gate, up = torch._grouped_mm(x, w13.transpose(1, 2), ends).chunk(2, dim=1)
        return torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), ends)

    calls: list[Call] = []
    for i, step in enumerate(steps):
        flat = step.topk_ids.flatten()
        x = step.hidden_states[flat.argsort() // shape.top_k]
        ends = torch.bincount(flat, minlength=shape.experts).cumsum(0).to(torch.int32)
        layer = weights.layer(i % weights.layers)
        calls.append(lambda x=x, ends=ends, layer=layer: call(x, ends, *layer))
    return calls


def reference(weights: Weights, layer: int, step: Step) -> torch.Tensor:
    """The layer in float32; with fp8 weights its inputs and activations are quantised as the kernels do."""
    scales = scale_arguments(weights, layer)
    tokens = (step.topk_weights, step.topk_ids)
    return fused_moe_torch(step.hidden_states, *weights.layer(layer), *tokens, **scales)


def torch_reference(shape: Shape, weights: Weights, steps: list[Step]) -> list[Call]:
    """The reference itself, expert by expert, called from the host."""
    return [
        lambda i=i, step=step: reference(weights, i % weights.layers, step) for i, step in enumerate(steps)
    ]


def missing(arm: str, dtype: torch.dtype) -> str:
    """Why ``arm`` cannot run here, or an empty string."""
    if dtype not in ARMS[arm].dtypes:
        return f"it does not take {dtype}"
    if arm in ("vllm", "vllm_swept", "torch_grouped_mm") and not torch.cuda.is_available():
        return "it needs CUDA"
    if arm in ("vllm", "vllm_swept") and importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    return ""


ARMS = {
    "vamp": Arm(vamp),
    "vamp_no_table": Arm(vamp_no_table),
    "vllm": Arm(vllm),
    "vllm_swept": Arm(vllm),  # under the configuration that moe_sweep finds
    "torch_grouped_mm": Arm(torch_grouped_mm, comparable=False, dtypes=(torch.bfloat16,)),
    "torch_reference": Arm(torch_reference, captured=False, dtypes=(torch.bfloat16, FP8), most_tokens=64),
}
