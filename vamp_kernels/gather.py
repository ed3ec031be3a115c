"""Gather copy: bring records, named by a list on the device, from slot to slot, as from host pages to HBM.

A few programs, each with several blocks of loads under way, fill the link and leave the other processors to
the products that run beside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vamp_kernels.arguments import check_records
from vamp_kernels.launch import GatherLaunch
from vamp_kernels.ranges import ranged


@triton.jit
def _gather_kernel(
    records,  # int64
    stride_slot,
    size,
    copies,
    copy_count,
    capacity,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    blocks = tl.cdiv(size, BLOCK)
    inside = tl.arange(0, BLOCK)
    for i in range(0, tl.load(copy_count)):
        source = records + tl.load(copies + i).to(tl.int64) * stride_slot
        target = records + tl.load(copies + capacity + i).to(tl.int64) * stride_slot
        for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
            at = block * BLOCK + inside
            tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


@ranged("copy")
def gather(
    records: torch.Tensor,
    copies: torch.Tensor,
    copy_count: torch.Tensor,
    launch: GatherLaunch | None = None,
) -> None:
    """``gather_torch`` by at most ``launch.programs`` programs; no host sync, so it can be captured.

    Raises:
        ValueError: naming the argument whose shape, dtype, device or strides do not fit; address, stride and
            size of the slots must be multiples of 16 bytes.
    """
    check_records("records", records)
    for name, tensor, shape in (("copies", copies, (2, copies.shape[-1])), ("copy_count", copy_count, (1,))):
        if tensor.shape != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}, expected {list(shape)} contiguous int32"
            )
        if tensor.device != records.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {records.device}, as records")
    launch = launch or GatherLaunch()
    words = records.flatten(1).view(torch.int64)
    _gather_kernel[(launch.programs,)](
        words,
        words.stride(0),
        words.shape[1],
        copies,
        copy_count,
        copies.shape[1],
        BLOCK=launch.block_bytes // 8,
        STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )


def gather_torch(records: torch.Tensor, copies: torch.Tensor, copy_count: torch.Tensor) -> None:
    """Copy slots of ``records`` to other slots of it.

    Args:
        records: ``[S, ...]``, slots contiguous, at any stride.
        copies: ``[2, C]`` int32, slots to copy from and to; no slot is both, and none is copied to twice.
        copy_count: ``[1]`` int32, how many of them to copy.
    """
    sources, targets = copies[:, : int(copy_count)].long()
    records[targets] = records[sources]
