"""Launch choices: a pure function of shape, dtype and device limits to frozen dataclasses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

FP8 = torch.float8_e4m3fn
SCALE_BLOCK = 128  # rows and columns of a weight, columns of an activation, that share a scale in fp8
# Beyond so many tokens, sorting pairs by expert costs less than reading shared experts once for each pair.
GEMV_TOKENS = 4
GEMV_TOKENS_FP8 = 8
PART_ROWS = 64  # that a group of warps multiplies where warps specialise
DEPENDENT_LAUNCH_TOKENS = 512
# A link of 55 GB/s with 2 us for a read wants 110 KB under way; several times that also covers the programs
# that are between two tiles.
HOST_BYTES_IN_FLIGHT, MAX_HOST_PROGRAMS = 384 << 10, 32
# Rows of a tile from which on every host-backed expert is staged: beside tiles so tall, which one program a
# processor works on, reading one in place keeps more of them waiting than a copy does.
STAGE_ALL_ROWS = 128


@dataclass(frozen=True)
class DeviceLimits:
    """What a launch choice depends on.

    Attributes:
        shared_bytes: shared memory one program may use.
        processors: streaming multiprocessors.
        capability: compute capability, such as ``(9, 0)``.
        specialised: the warp-specialised GEMMs run: compute capability 9.0 and a Triton that they are for.
    """

    shared_bytes: int
    processors: int
    capability: tuple[int, int]
    specialised: bool = False

    @property
    def has_tma(self) -> bool:
        return self.capability >= (9, 0)

    @property
    def has_fp8(self) -> bool:
        return self.capability >= (8, 9) or self.capability == (0, 0)  # which is the interpreter

    @property
    def has_dependent_launch(self) -> bool:
        return self.capability >= (9, 0)


@dataclass(frozen=True)
class GemmLaunch:
    """One grouped GEMM over the tile table.

    Attributes:
        block_m: rows (token and expert pairs) that a program multiplies. The tile table is built for the
            gate-up GEMM's; the down GEMM's is a divisor of it, and its programs take parts of tiles.
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
        store = self.block_m * self.block_n * (2 if itemsize == 1 else 1) if self.span > 1 else 0
        return self.num_stages * (self.block_m + weight_rows) * self.block_k * itemsize + store

    def host_programs(self, weight_bytes: int) -> int:
        """Programs that together fill the link to host memory, each reading ``weight_bytes`` a step."""
        ahead = max(self.num_stages - 1, 1) * weight_bytes
        return min(power_of_two(-(-HOST_BYTES_IN_FLIGHT // ahead)), MAX_HOST_PROGRAMS)


@dataclass(frozen=True)
class SpecialisedLaunch:
    """A grouped GEMM of bf16 or fp16 by persistent programs, where some warps load and others multiply.

    Attributes:
        block_m: rows of a tile, 128 or 192: 64 for each of two or three groups of multiplying warps.
        block_n: as of ``GemmLaunch``; columns are a multiple of it, and the reduction one of ``block_k``.
        num_stages: steps along the reduction that shared memory holds.
    """

    block_m: int
    block_n: int
    num_stages: int

    block_k: ClassVar[int] = 64

    @property
    def parts(self) -> int:
        return self.block_m // PART_ROWS

    def shared_bytes(self, weight_rows: int, itemsize: int) -> int:
        """Shared memory for the operands and two barriers a stage, and to bring blocks into store order."""
        stage = (self.block_m + weight_rows) * self.block_k * itemsize + 16
        return self.num_stages * stage + self.parts * 2048 + 64

    def host_programs(self, weight_bytes: int) -> int:
        """Programs that together fill the link to host memory, each reading ``weight_bytes`` a step."""
        return min(-(-HOST_BYTES_IN_FLIGHT // ((self.num_stages - 1) * weight_bytes)), MAX_HOST_PROGRAMS)


@dataclass(frozen=True)
class GemvLaunch:
    """A product with one vector: ``block_n`` outputs a program, ``block_k`` inputs a step."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class GatherLaunch:
    """A copy over the link to host memory.

    Attributes:
        programs: each takes a processor, or a share of one, for as long as the copy lasts.
        block_bytes: what a program reads in a step: all of it is under way at once, or with more stages all
            but one step of them. Long steps in registers fill the link from fewer processors.
    """

    programs: int = 4
    block_bytes: int = 65536
    num_warps: int = 16
    num_stages: int = 1


@dataclass(frozen=True)
class MoeLaunch:
    """The launches of one call: GEMV for both products, or for neither.

    Then ``block_m`` of the second divides that of the first, and equals it where the second is specialised.
    """

    gate_up: GemmLaunch | SpecialisedLaunch | GemvLaunch
    down: GemmLaunch | SpecialisedLaunch | GemvLaunch
    dependent_launch: bool = False


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of ``device``; for a CPU, where kernels are only interpreted, those of no real device."""
    if device.type != "cuda":
        return DeviceLimits(shared_bytes=1 << 18, processors=1, capability=(0, 0))
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return DeviceLimits(
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        processors=properties.multi_processor_count,
        capability=capability,
        specialised=capability == (9, 0) and _has_gluon(),
    )


def _has_gluon() -> bool:
    """Whether Triton is one that the specialised GEMMs are for: 3.7 or later, which has this name."""
    try:
        from triton.experimental.gluon import language
    except ImportError:
        return False
    return hasattr(language, "barrier")


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
    A kernel starts before the one ahead of it ends only while launch gaps show. Measured on an H200.

    In fp8 a step of the GEMMs is one block of scales, and so are the columns of a
    program of the gate-up GEMM, which quantises what it writes.

    Raises:
        ValueError: for fp8 below compute capability 8.9.
    """
    fp8 = dtype == FP8
    if fp8 and not limits.has_fp8:
        at = ".".join(map(str, limits.capability))
        raise ValueError(f"w13 is {dtype}, expected bf16 or fp16 on compute capability {at}: fp8 needs 8.9")
    if tokens <= (GEMV_TOKENS_FP8 if fp8 else GEMV_TOKENS):
        gemv = _gemv_fp8(hidden, intermediate) if fp8 else _gemv(tokens, hidden, intermediate)
        return MoeLaunch(*gemv, limits.has_dependent_launch)
    hit = experts * (1.0 - (1.0 - min(top_k / experts, 1.0)) ** tokens)
    rows = tokens * top_k / hit
    gemm = _gemm_fp8 if fp8 else _gemm
    up, down = gemm(rows, power_of_two(intermediate))
    up, down = (replace(launch, tma=limits.has_tma) for launch in (up, down))
    plain = MoeLaunch(
        fit(up, 2 * up.block_n, dtype.itemsize, limits, SCALE_BLOCK if fp8 else 32),
        fit(down, down.block_n, dtype.itemsize, limits, SCALE_BLOCK if fp8 else 32),
        dependent_launch=limits.has_dependent_launch and tokens <= DEPENDENT_LAUNCH_TOKENS,
    )
    return plain if fp8 or not limits.specialised else _specialised(plain, rows, hidden, intermediate)


def warm_sizes(most: int, choose: Callable[[int], MoeLaunch]) -> list[int]:
    """Numbers of tokens, the largest first, that together launch all that up to ``most`` tokens do.

    The largest of every choice, and halvings of ``most``: kernels are compiled by powers of two as well.
    """
    halvings = {most >> shift for shift in range(most.bit_length())}
    choices = {choose(tokens): tokens for tokens in range(1, most + 1)}
    return sorted(halvings | set(choices.values()), reverse=True)


def check_launch(launch: MoeLaunch, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless both products can run so, over weights of ``dtype``.

    In fp8 a step of a GEMM is one group of scales, one of a GEMV whole groups, and the columns of a program
    lie in one block of them; the gate-up GEMM writes whole groups.
    """
    up, down = launch.gate_up, launch.down
    for stage in (up, down):
        _check_sizes(stage)
    if isinstance(up, GemvLaunch) != isinstance(down, GemvLaunch):
        raise ValueError("launch mixes GEMV and GEMM, expected one kind for both products")
    if not isinstance(up, GemvLaunch) and not isinstance(down, GemvLaunch):
        whole = isinstance(down, SpecialisedLaunch)
        if up.block_m % down.block_m or (whole and up.block_m != down.block_m):
            expected = "equal ones" if whole else "one that the second divides"
            raise ValueError(f"launch has block_m {up.block_m} and {down.block_m}, expected {expected}")
    if dtype != FP8:
        return
    for stage, columns in ((up, (SCALE_BLOCK,)), (down, (32, 64, SCALE_BLOCK))):
        if isinstance(stage, GemvLaunch):
            fits = stage.block_k % SCALE_BLOCK == 0 and SCALE_BLOCK % stage.block_n == 0
            expected = f"a divisor and a multiple of {SCALE_BLOCK}"
        else:
            fits = stage.block_k == SCALE_BLOCK and stage.block_n in columns
            expected = f"block_n of {columns} and block_k {SCALE_BLOCK}"
        if not fits:
            raise ValueError(
                f"launch has block_n {stage.block_n} and block_k {stage.block_k}, expected {expected} for fp8"
            )


def _check_sizes(stage: GemmLaunch | SpecialisedLaunch | GemvLaunch) -> None:
    """Raise ``ValueError`` for sizes no kernel takes; the plain ones' blocks and warps are powers of two."""
    for name, size in vars(stage).items():
        if isinstance(size, bool):
            continue
        power = not isinstance(stage, SpecialisedLaunch) and name not in ("span", "num_stages")
        least = 0 if name == "small_m" else 1
        if size < least or (power and size > 0 and size != power_of_two(size)):
            expected = "a power of two" if power else "1 or more"
            raise ValueError(f"launch has {name} {size}, expected {expected}")


def check_specialised(launch: MoeLaunch, hidden: int, intermediate: int, limits: DeviceLimits) -> None:
    """Raise ``ValueError`` where a specialised product cannot run on this device or over these sizes."""
    for stage, columns, reduction in (
        (launch.gate_up, intermediate, hidden),
        (launch.down, hidden, intermediate),
    ):
        if not isinstance(stage, SpecialisedLaunch):
            continue
        if not limits.specialised:
            raise ValueError("launch is specialised, expected compute capability 9.0 and Triton 3.7 for that")
        if launch.dependent_launch:
            raise ValueError("launch is specialised and dependent, expected one of them")
        if stage.block_m not in (2 * PART_ROWS, 3 * PART_ROWS):
            raise ValueError(f"launch has block_m {stage.block_m}, expected 128 or 192 to be specialised")
        if columns % stage.block_n or reduction % stage.block_k:
            raise ValueError(
                f"launch has block_n {stage.block_n} and block_k {stage.block_k}, "
                f"expected divisors of {columns} and {reduction} to be specialised"
            )


def fit(
    launch: GemmLaunch, weight_rows: int, itemsize: int, limits: DeviceLimits, shortest: int = 32
) -> GemmLaunch:
    """``launch`` with fewer stages, then a shorter step, until its operands fit into shared memory."""
    while launch.shared_bytes(weight_rows, itemsize) > limits.shared_bytes:
        if launch.num_stages > 2:
            launch = replace(launch, num_stages=launch.num_stages - 1)
        elif launch.block_k > shortest:
            launch = replace(launch, block_k=launch.block_k // 2)
        else:
            raise ValueError(f"{launch} needs more than {limits.shared_bytes} bytes of shared memory")
    return launch


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def _gemv(tokens: int, hidden: int, intermediate: int) -> tuple[GemvLaunch, GemvLaunch]:
    """Long reads where there are few programs, more outputs a program where there are many."""
    gate_up = GemvLaunch(block_n=1, block_k=min(power_of_two(hidden), 2048), num_warps=1)
    if tokens > 2:
        return gate_up, GemvLaunch(block_n=8, block_k=min(power_of_two(intermediate), 128), num_warps=1)
    if intermediate >= 512:
        return gate_up, GemvLaunch(block_n=4, block_k=512, num_warps=2)
    return gate_up, GemvLaunch(block_n=4, block_k=min(power_of_two(intermediate), 256), num_warps=1)


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


def _specialised(plain: MoeLaunch, rows: float, hidden: int, intermediate: int) -> MoeLaunch:
    """``plain`` with specialised products where an expert has many rows and blocks divide the sizes."""
    if rows > 100 and hidden % 128 == 0 and intermediate % 64 == 0:
        return MoeLaunch(SpecialisedLaunch(192, 64, 5), SpecialisedLaunch(192, 128, 5))
    if rows <= 52 or hidden % 256 or intermediate % 128 or intermediate > 1024:
        return plain
    low = replace(plain, gate_up=SpecialisedLaunch(128, 128, 4), dependent_launch=False)
    if intermediate <= 128:
        return low
    return replace(low, down=SpecialisedLaunch(128, *((128, 5) if intermediate <= 256 else (256, 4))))


def _gemv_fp8(hidden: int, intermediate: int) -> tuple[GemvLaunch, GemvLaunch]:
    """Every program quantises its input, so it has more outputs than in bf16."""
    gate_up = GemvLaunch(block_n=4, block_k=min(power_of_two(hidden), 1024), num_warps=1)
    block_k = min(power_of_two(intermediate), 512)
    if block_k <= 128:
        return gate_up, GemvLaunch(block_n=8, block_k=block_k, num_warps=1)
    return gate_up, GemvLaunch(block_n=16, block_k=block_k, num_warps=block_k // 128)


def _gemm_fp8(rows: float, reduction: int) -> tuple[GemmLaunch, GemmLaunch]:
    """As ``_gemm``; both operands lie in shared memory, where weights take the M side of small tiles."""
    short = reduction <= 128
    if rows <= 12:
        span = 8 if short else 4 if reduction <= 256 else 1
        up = GemmLaunch(16, 128, 128, 4, 3, swap_ab=True)
        return up, replace(up, span=span)
    if rows <= 25:
        up = GemmLaunch(32, 128, 128, 4, 3, swap_ab=True, small_m=16)
        return up, replace(up, small_m=0, span=8) if short else replace(up, span=4)
    if rows <= 52:
        return GemmLaunch(64, 128, 128, 8, 4), GemmLaunch(64, 128, 128, 8, 4, span=16 if short else 4)
    down = GemmLaunch(64, 128, 128, 4, 3, span=16) if short else GemmLaunch(64, 128, 128, 8, 4, span=4)
    return GemmLaunch(128, 128, 128, 8, 4, small_m=64), down
