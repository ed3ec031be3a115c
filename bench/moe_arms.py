"""What is timed side by side: our layer, vLLM's fused experts, and torch's grouped matrix product."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from moe_cases import Shape, Step, Weights

from vamp_kernels.fused_moe import fused_moe
from vamp_kernels.workspace import Workspace

Call = Callable[[], torch.Tensor]


def vamp(shape: Shape, weights: Weights, steps: list[Step]) -> list[Call]:
    """Our layer through its slot table, counting hits, with a workspace."""
    device = steps[0].hidden_states.device
    workspace = Workspace(device)
    hits = torch.zeros(shape.experts, dtype=torch.int32, device=device)
    out = torch.empty_like(steps[0].hidden_states)

    def call(step: Step, slots: torch.Tensor) -> torch.Tensor:
        return fused_moe(
            step.hidden_states,
            weights.w13,
            weights.w2,
            step.topk_weights,
            step.topk_ids,
            slots,
            out=out,
            hits=hits,
            workspace=workspace,
        )

    layers = len(weights.slots)
    return [
        lambda step=step, slots=weights.slots[i % layers]: call(step, slots) for i, step in enumerate(steps)
    ]


def vllm(shape: Shape, weights: Weights, steps: list[Step]) -> list[Call]:
    """vLLM's Triton experts over the same records (``vllm/model_executor/layers/fused_moe/fused_moe.py``)."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def call(step: Step, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        with set_current_vllm_config(VllmConfig()):
            return fused_experts(step.hidden_states, w13, w2, step.topk_weights, step.topk_ids)

    layers = [weights.layer(i % len(weights.slots)) for i in range(len(steps))]
    return [
        lambda step=step, layer=layer: call(step, *layer) for step, layer in zip(steps, layers, strict=True)
    ]


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
        layer = weights.layer(i % len(weights.slots))
        calls.append(lambda x=x, ends=ends, layer=layer: call(x, ends, *layer))
    return calls


def missing(arm: str) -> str:
    """Why ``arm`` cannot run here, or an empty string."""
    if arm != "vamp" and not torch.cuda.is_available():
        return "it needs CUDA"
    if arm == "vllm" and importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    return ""


ARMS = {"vamp": vamp, "vllm": vllm, "torch_grouped_mm": torch_grouped_mm}
COMPARABLE = ("vamp", "vllm")  # arms whose result is the layer's
