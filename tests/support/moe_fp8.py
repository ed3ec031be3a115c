"""An MoE layer in fp8 with blocks of 128 by 128, made and computed without any code of the kernels."""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 128


def to_fp8(a: dict[str, Any]) -> dict[str, Any]:
    """The arguments ``a`` with fp8 weights and their scales, which differ by a factor of up to seven."""
    out = dict(a)
    for name in ("w13", "w2"):
        experts, rows, columns = a[name].shape
        blocks = a[name].float().view(experts, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        seeds = torch.arange(experts * rows * columns // BLOCK**2, device=blocks.device)
        blocks = blocks * (0.25 + (seeds * 7 % 13) / 8).view(experts, rows // BLOCK, 1, -1, 1)
        scale = blocks.abs().amax(dim=(2, 4)) / 448
        out[name] = (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn).view(a[name].shape)
        out[f"{name}_scale"] = scale
    return out


def weight(a: dict[str, Any], name: str, expert: int) -> torch.Tensor:
    """What the expert's weight is, in float64."""
    scale = a[f"{name}_scale"][expert].double()
    return a[name][expert].double() * torch.kron(scale, torch.ones(BLOCK, BLOCK).to(scale))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What rows ``x`` are after quantisation by group of 128, in float64.

    The steps in float32 are the kernels': of bf16 values many lie half-way between two of e4m3.
    """
    groups = x.float().view(len(x), -1, BLOCK)
    scale = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-10) * (1 / 448)
    return ((groups * (1 / scale)).to(torch.float8_e4m3fn).double() * scale.double()).view(x.shape)


def exact(a: dict[str, Any], on_input: bool = False) -> torch.Tensor:
    """The layer in float64; only the inputs of the two products are quantised."""
    x = rounded(a["hidden_states"])
    out = torch.zeros_like(x)
    for expert in a["topk_ids"].unique().tolist():
        if expert < 0:
            continue
        rows, choices = (a["topk_ids"] == expert).nonzero(as_tuple=True)
        router = a["topk_weights"][rows, choices, None].double()
        gate, up = (x[rows] @ weight(a, "w13", expert).T * (router if on_input else 1)).chunk(2, dim=1)
        y = rounded(torch.nn.functional.silu(gate) * up) @ weight(a, "w2", expert).T
        out.index_add_(0, rows, y if on_input else y * router)
    return out
