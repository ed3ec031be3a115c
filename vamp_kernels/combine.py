"""Combine: the sum over a token's choices, in one order, in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import power_of_two


@triton.jit
def _combine_kernel(
    partial,
    topk_ids,
    out,
    out_stride,
    hidden,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, CHOICES)
    chosen = tl.load(topk_ids + token * TOP_K + choice, mask=choice < TOP_K, other=-1) >= 0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = partial + (token * TOP_K + choice)[:, None] * hidden + columns[None, :]
    rows = tl.load(at, mask=chosen[:, None] & (columns < hidden)[None, :], other=0.0)
    total = tl.sum(rows.to(tl.float32), 0)
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=columns < hidden)


def combine(
    partial: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor, dependent_launch: bool = False
) -> None:
    """Write ``out`` (``[M, H]``), the sum of ``partial`` (``[M * K, H]``) over choices that are not -1."""
    tokens, top_k = topk_ids.shape
    block = min(power_of_two(out.shape[1]), 1024)
    _combine_kernel[(tokens, triton.cdiv(out.shape[1], block))](
        partial,
        topk_ids,
        out,
        out.stride(0),
        out.shape[1],
        TOP_K=top_k,
        CHOICES=power_of_two(top_k),
        BLOCK=block,
        PDL=dependent_launch,
        num_warps=4,
        launch_pdl=dependent_launch,
    )


def combine_torch(partial: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """The same in torch, as float32."""
    rows = partial.view(*topk_ids.shape, -1).float()
    return torch.where((topk_ids >= 0)[..., None], rows, 0.0).sum(dim=1)
