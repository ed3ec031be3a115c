"""Quantisation to fp8 (e4m3): one float32 scale for every row and group of 128 columns.

The numbers are those of vLLM's ``per_token_group_quant_fp8``, but for a reciprocal in place of a division for
every element, so that kernel and reference agree bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import SCALE_BLOCK
from vamp_kernels.operands import interpreted
from vamp_kernels.ranges import ranged

LARGEST = 448.0
FLOOR = 1e-10  # of the largest magnitude of a group, so that a group of zeros has a scale
_INVERSE = tl.constexpr(1.0 / LARGEST)
_FLOOR = tl.constexpr(FLOOR)
_GROUP = tl.constexpr(SCALE_BLOCK)


@triton.jit
def quantize_groups(values, INTERPRET: tl.constexpr):
    """e4m3 and scales (``[R]``) of float32 ``values`` (``[R, 128]``)."""
    scale = tl.maximum(tl.max(tl.abs(values), 1), _FLOOR) * _INVERSE
    values *= tl.div_rn(1.0, scale)[:, None]
    if INTERPRET:  # which rounds to e4m3 wrongly: round here, to the exponent's steps or those of zero
        power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(power, 0.015625) * 1572864.0
        values = (values + shift) - shift
    return values.to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["groups"])
def _quantize_kernel(
    x,
    x_stride,
    quantized,  # [M, H]
    scales,  # [M, H / 128]
    groups,
    hidden,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = group < groups
    width = hidden // _GROUP
    row = (group // width).to(tl.int64)
    column = (group % width * _GROUP)[:, None] + tl.arange(0, _GROUP)[None, :]
    values = tl.load(x + row[:, None] * x_stride + column, mask=live[:, None], other=0.0)
    q, scale = quantize_groups(values.to(tl.float32), INTERPRET)
    tl.store(quantized + row[:, None] * hidden + column, q, mask=live[:, None])
    tl.store(scales + group, scale, mask=live)


@ranged("quantize")
def quantize(
    x: torch.Tensor,
    quantized: torch.Tensor,
    scales: torch.Tensor,
    block: int = 16,
    num_warps: int = 4,
    dependent_launch: bool = False,
) -> None:
    """Write ``quantized`` (``[M, H]`` e4m3) and ``scales`` (``[M, H / 128]`` float32) of rows ``x``."""
    groups = scales.numel()
    _quantize_kernel[(triton.cdiv(groups, block),)](
        x,
        x.stride(0),
        quantized,
        scales,
        groups,
        x.shape[1],
        BLOCK=block,
        INTERPRET=interpreted(),
        PDL=dependent_launch,
        num_warps=num_warps,
        launch_pdl=dependent_launch,
    )


def quantize_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch, for ``x`` (``[M, H]``): e4m3 (``[M, H]``) and scales (``[M, H / 128]``)."""
    groups = x.float().unflatten(1, (-1, SCALE_BLOCK))
    scales = groups.abs().amax(dim=2).clamp_min(FLOOR) * (1.0 / LARGEST)
    return (groups * scales.reciprocal()[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def dequantize_torch(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 ``[N, K]`` of e4m3 ``x``; ``scales`` is ``[N, K / 128]`` by row, or ``[N / 128, K / 128]``."""
    columns = scales.repeat_interleave(SCALE_BLOCK, dim=1)
    return x.float() * (columns if len(scales) == len(x) else columns.repeat_interleave(SCALE_BLOCK, dim=0))
