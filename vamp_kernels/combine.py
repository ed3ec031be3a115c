"""Combine: the sum over a token's choices, in one order, in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import power_of_two
from vamp_kernels.ranges import ranged

PASSED_OVER = 4  # tokens a program looks at where it may have nothing to do for some


@triton.jit
def _combine_token(partial, out, out_stride, hidden, token, choice, chosen, columns, TOP_K: tl.constexpr):
    at = partial + (token * TOP_K + choice)[:, None] * hidden + columns[None, :]
    rows = tl.load(at, mask=chosen[:, None] & (columns < hidden)[None, :], other=0.0)
    total = tl.sum(rows.to(tl.float32), 0)
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=columns < hidden)


@triton.jit(do_not_specialize=["tokens"])
def _combine_kernel(
    partial,
    topk_ids,
    host_experts,
    out,
    out_stride,
    tokens,
    hidden,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    HOSTED: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, CHOICES)
    if host_experts is None:
        chosen = tl.load(topk_ids + token * TOP_K + choice, mask=choice < TOP_K, other=-1) >= 0
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        _combine_token(partial, out, out_stride, hidden, token, choice, chosen, columns, TOP_K)
    else:
        for i in range(token, tl.minimum(token + TOKENS, tokens)):
            expert = tl.load(topk_ids + i * TOP_K + choice, mask=choice < TOP_K, other=-1).to(tl.int32)
            hosted = tl.load(host_experts + expert, mask=expert >= 0, other=0) != 0
            if (tl.max(hosted.to(tl.int32), 0) != 0) == HOSTED:
                _combine_token(partial, out, out_stride, hidden, i, choice, expert >= 0, columns, TOP_K)


@ranged("combine")
def combine(
    partial: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    dependent_launch: bool = False,
    host_experts: torch.Tensor | None = None,
    hosted: bool = False,
) -> None:
    """Write ``out`` (``[M, H]``), the sum of ``partial`` (``[M * K, H]``) over choices that are not -1.

    With ``host_experts`` (``[E]`` bool), only the rows of tokens that chose one of them, or of those that
    chose none: ``hosted`` says which. A dependent launch is for all rows only.
    """
    tokens, top_k = topk_ids.shape
    block = min(power_of_two(out.shape[1]), 1024)
    each = 1 if host_experts is None else PASSED_OVER
    _combine_kernel[(triton.cdiv(tokens, each), triton.cdiv(out.shape[1], block))](
        partial,
        topk_ids,
        host_experts,
        out,
        out.stride(0),
        tokens,
        out.shape[1],
        TOP_K=top_k,
        CHOICES=power_of_two(top_k),
        TOKENS=each,
        BLOCK=block,
        HOSTED=hosted,
        PDL=dependent_launch,
        num_warps=4,
        launch_pdl=dependent_launch,
    )


def combine_torch(partial: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """The same in torch, as float32, of all rows."""
    rows = partial.view(*topk_ids.shape, partial.shape[-1]).float()
    return torch.where((topk_ids >= 0)[..., None], rows, 0.0).sum(dim=1)
