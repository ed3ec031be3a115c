"""Launch choices: a pure function of shape, dtype and device limits to frozen dataclasses."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

GEMV_TOKENS = 8
DEPENDENT_LAUNCH_TOKENS = 64


@dataclass(frozen=True)
class DeviceLimits:
    """What a launch choice depends on.

    Attributes:
        shared_bytes: shared memory one program may use.
        processors: streaming multiprocessors.
        capability: compute capability, such as ``(9, 0)``.
    """

    shared_bytes: int
    processors: int
    capability: tuple[int, int]

    @property
    def has_tma(self) -> bool:
        return self.capability >= (9, 0)

    @property
    def has_dependent_launch(self) -> bool:
        return self.capability >= (9, 0)


@dataclass(frozen=True)
class GemmLaunch:
    """One grouped GEMM over the tile table.

    Attributes:
        block_m: rows (token and expert pairs) of a tile; the tile table is built for it.
        block_n: output columns of a program; the gate-up GEMM reads as many gate as up rows of ``w13``.
        block_k: step along the reduction.
        swap_ab: weights take the M side of the matrix instruction, which suits few rows per tile.
        tma: weights are loaded by the bulk tensor copy engine.
        small_m: a tile of at most so many rows is computed as one of that height; 0 for none.
        span: blocks of columns that a program of the down GEMM goes through; where ``block_k`` covers the
            whole reduction, it keeps its rows and streams the weights.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap_ab: bool = False
    tma: bool = False
    small_m: int = 0
    span: int = 1

    def shared_bytes(self, weight_rows: int, itemsize: int) -> int:
        """Shared memory for the operands, ``weight_rows`` rows of weights a stage, and to store a block.

        Only with a span are both alive at once, as the next block's loads run ahead. What a store takes is
        what Triton 3.6 and 3.7 were seen to allocate.
        """
        store = self.block_m * self.block_n if self.span > 1 else 0
        return self.num_stages * (self.block_m + weight_rows) * self.block_k * itemsize + store


@dataclass(frozen=True)
class GemvLaunch:
    """A product with one vector: ``block_n`` outputs a program, ``block_k`` inputs a step."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class MoeLaunch:
    """The launches of one call: GEMV for both products, or GEMM for both with the same ``block_m``."""

    gate_up: GemmLaunch | GemvLaunch
    down: GemmLaunch | GemvLaunch
    dependent_launch: bool = False


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of ``device``; for a CPU, where kernels are only interpreted, those of no real device."""
    if device.type != "cuda":
        return DeviceLimits(shared_bytes=1 << 16, processors=1, capability=(0, 0))
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        processors=properties.multi_processor_count,
        capability=(properties.major, properties.minor),
    )


def choose_launch(
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    limits: DeviceLimits,
) -> MoeLaunch:
    """The launches for ``tokens`` rows of ``top_k`` experts each, out of ``experts``.

    What decides is the mean number of rows of an expert that is hit, under uniform routing: below about 100
    the time is that of reading each expert once, so a tile should hold all rows of most experts and no more.
    A kernel starts before the one ahead of it ends only while launch gaps show: later its programs would take
    room from the ones that still work. Measured on an H200.
    """
    if tokens <= GEMV_TOKENS:
        return MoeLaunch(*_gemv(hidden, intermediate), limits.has_dependent_launch)
    hit = experts * (1.0 - (1.0 - min(top_k / experts, 1.0)) ** tokens)
    up, down = _gemm(tokens * top_k / hit, power_of_two(intermediate))
    up, down = (replace(launch, tma=limits.has_tma) for launch in (up, down))
    return MoeLaunch(
        fit(up, 2 * up.block_n, dtype.itemsize, limits),
        fit(down, down.block_n, dtype.itemsize, limits),
        dependent_launch=limits.has_dependent_launch and tokens <= DEPENDENT_LAUNCH_TOKENS,
    )


def fit(launch: GemmLaunch, weight_rows: int, itemsize: int, limits: DeviceLimits) -> GemmLaunch:
    """``launch`` with fewer stages, then a shorter step, until its operands fit into shared memory."""
    while launch.shared_bytes(weight_rows, itemsize) > limits.shared_bytes:
        if launch.num_stages > 2:
            launch = replace(launch, num_stages=launch.num_stages - 1)
        elif launch.block_k > 32:
            launch = replace(launch, block_k=launch.block_k // 2)
        else:
            raise ValueError(f"{launch} needs more than {limits.shared_bytes} bytes of shared memory")
    return launch


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def _gemv(hidden: int, intermediate: int) -> tuple[GemvLaunch, GemvLaunch]:
    gate_up = GemvLaunch(block_n=1, block_k=min(power_of_two(hidden), 2048), num_warps=1)
    if intermediate >= 512:
        return gate_up, GemvLaunch(block_n=4, block_k=512, num_warps=2)
    return gate_up, GemvLaunch(block_n=4, block_k=min(power_of_two(intermediate), 128), num_warps=1)


def _gemm(rows: float, reduction: int) -> tuple[GemmLaunch, GemmLaunch]:
    """Gate-up and down for ``rows`` rows an expert; ``reduction`` is the down GEMM's, as a power of two.

    A short reduction leaves little to pipeline, so programs go through several blocks of columns.
    """
    short = reduction <= 128
    if rows <= 12:
        return GemmLaunch(16, 64, 128, 4, 3), GemmLaunch(16, 128, 128, 4, 2)
    if rows <= 25:
        down = GemmLaunch(32, 128, 128, 4, 3, span=4) if short else GemmLaunch(32, 256, 64, 4, 3)
        return GemmLaunch(32, 64, 128, 4, 3), down
    if rows <= 52:
        down = GemmLaunch(64, 64, 128, 4, 3, span=16) if short else GemmLaunch(64, 128, 64, 4, 3)
        return GemmLaunch(64, 64, 64, 4, 4), down
    gate_up = GemmLaunch(128, 128, 64, 8, 4, small_m=64)
    if short:
        return gate_up, GemmLaunch(128, 64, 128, 8, 3, small_m=64, span=32)
    span = 4 if reduction <= 256 or rows > 100 else 1
    return gate_up, GemmLaunch(128, 256, 64, 8, 4, small_m=64, span=span)
