"""What the two grouped GEMMs share: how operands are seen, loaded and multiplied, and their launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vamp_kernels.launch import GemmLaunch
from vamp_kernels.tiles import Routing, tile_programs


@triton.jit
def load_rows(at, live, k, extent, EVEN_K: tl.constexpr):
    """A step of the rows at ``at``, columns ``k``; zeros for rows that are not ``live``."""
    if EVEN_K:
        rows = tl.load(at, mask=live[:, None], other=0.0)
    else:
        rows = tl.load(at, mask=live[:, None] & (k < extent)[None, :], other=0.0)
    return rows


@triton.jit
def load_weight(
    w,  # a descriptor, with TMA
    at,  # pointers to the first step, without
    slot,
    n0,
    k0,
    k,
    extent,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """A step of a weight's rows from ``n0``, ``[BLOCK_N, BLOCK_K]``."""
    if TMA:
        rows = w.load([slot, n0, k0]).reshape(BLOCK_N, BLOCK_K)
    elif EVEN_K:
        rows = tl.load(at + k0)
    else:
        rows = tl.load(at + k0, mask=(k0 + k < extent)[None, :], other=0.0)
    return rows


@triton.jit
def zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP_AB: tl.constexpr):
    """A total that ``product`` adds to."""
    return tl.zeros([BLOCK_N, BLOCK_M] if SWAP_AB else [BLOCK_M, BLOCK_N], tl.float32)


@triton.jit
def product(a, w, total, SWAP_AB: tl.constexpr, INTERPRET: tl.constexpr):
    """``total + a @ w.T``; its transpose with ``SWAP_AB``."""
    if INTERPRET:  # the interpreter's bf16 dot is wrong
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(w, a.T, total) if SWAP_AB else tl.dot(a, w.T, total)


@triton.jit
def scaled_product(a, w, total, a_scale, w_scale, SWAP_AB: tl.constexpr, INTERPRET: tl.constexpr):
    """``product`` of e4m3 blocks of one group along the reduction: scales by row of ``a``, one for ``w``.

    The matrix unit of Hopper keeps about 14 bits of a sum of e4m3 products; adding every group to a float32
    total outside it bounds what is lost.
    """
    part = product(a, w, tl.zeros(total.shape, tl.float32), SWAP_AB, INTERPRET)
    scale = a_scale * w_scale
    return total + part * (scale[None, :] if SWAP_AB else scale[:, None])


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``, set before triton is imported)."""
    return bool(triton.knobs.runtime.interpret)


def weight_operand(weight: torch.Tensor, launch: GemmLaunch) -> Any:
    """``weight`` (``[S, N, K]``), or a descriptor with the slot as a coordinate where the launch wants TMA.

    The copy engine needs 16-byte aligned strides and addresses; a weight without them is read by pointer.
    """
    item = weight.element_size()
    aligned = weight.data_ptr() % 16 == 0 and all(s * item % 16 == 0 for s in weight.stride()[:2])
    if not (launch.tma and aligned):
        return weight
    block = [1, launch.block_n, launch.block_k]
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), block)


def gemm_launch(
    weight: torch.Tensor,
    routing: Routing,
    launch: GemmLaunch,
    blocks: int,
    weight_rows: int,
    weight_on_input: bool,
    dependent_launch: bool,
    staged: bool,
) -> tuple[Any, int, dict[str, Any]]:
    """The weight's operand, number of programs, and compile-time arguments and options, of either GEMM.

    ``blocks`` is the programs for each tile, ``weight_rows`` how many rows of ``weight`` one reads in a step.
    """
    operand = weight_operand(weight, launch)
    weight_bytes = weight_rows * launch.block_k * weight.element_size()
    programs, host_programs = tile_programs(routing, blocks, launch, weight_bytes, staged)
    flags = {
        "BLOCK_M": launch.block_m,
        "SMALL_M": launch.small_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": launch.block_k,
        "EVEN_K": weight.shape[2] % launch.block_k == 0,
        "SWAP_AB": launch.swap_ab,
        "TMA": operand is not weight,
        "WEIGHT_ON_INPUT": weight_on_input,
        "INTERPRET": interpreted(),
        "PDL": dependent_launch,
        "BY_TIER": routing.by_tier,
        "HOST_PROGRAMS": host_programs,
        "STAGED": staged,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "launch_pdl": dependent_launch,
    }
    return operand, programs, flags
