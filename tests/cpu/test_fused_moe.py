from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import moe_fp8

from vamp_kernels import ranges
from vamp_kernels.fused_moe import fused_moe, fused_moe_torch
from vamp_kernels.launch import GemmLaunch, GemvLaunch, MoeLaunch
from vamp_kernels.workspace import Workspace

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA and not INTERPRET else "cpu"
# Without CUDA these tests run in a child process, where Triton is told to interpret before its import.
kernels_run = pytest.mark.skipif(not (INTERPRET or CUDA), reason="needs CUDA or TRITON_INTERPRET=1")


@dataclass(frozen=True)
class Case:
    tokens: int = 9
    experts: int = 6
    top_k: int = 3
    hidden: int = 48
    intermediate: int = 32
    routing: str = "uniform"
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "few tokens": Case(tokens=2, intermediate=6),
    "one token": Case(tokens=1, top_k=6, intermediate=4),
    "no token": Case(tokens=0),
    "uniform": Case(),
    "one expert": Case(tokens=37, routing="one"),
    "skewed": Case(tokens=50, experts=33, routing="skewed"),
    "top-1": Case(tokens=20, top_k=1),
    "all padding": Case(routing="padding"),
    "few, all padding": Case(tokens=2, intermediate=4, routing="padding"),
    "odd sizes": Case(tokens=13, experts=7, hidden=37, intermediate=19),
    "few, odd sizes": Case(tokens=2, experts=7, hidden=37, intermediate=7),
    "fp16": Case(dtype=torch.float16),
}
LARGE = {
    "decode": Case(1, 512, 10, 2048, 512),
    "few": Case(4, 512, 10, 2048, 128),
    "small batch": Case(16, 512, 10, 2048, 256),
    "batch": Case(128, 512, 10, 2048, 512),
    "TP4": Case(300, 512, 10, 2048, 128),
    "mixed": Case(1024, 512, 10, 2048, 512, "skewed"),
    "prefill": Case(4096, 512, 10, 2048, 256),
    "long prefill": Case(8192, 512, 10, 2048, 128),
    "one expert": Case(2048, 512, 10, 2048, 512, "one"),
    "every expert of 1024": Case(700, 1024, 16, 512, 64),
    "odd": Case(333, 257, 7, 1000, 200, "skewed"),
    "odd, unaligned": Case(70, 31, 5, 509, 77),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def make(case: Case, seed: int = 0, device: str = DEVICE) -> dict[str, Any]:
    """Arguments for ``case``: where it can be, the last expert is empty and one id is padding."""
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=case.dtype)

    score = torch.rand(case.tokens, case.experts, generator=g, device=device)
    if case.routing == "skewed":
        score += 1.06 * torch.randn(case.experts, generator=g, device=device)
    if case.top_k < case.experts:
        score[:, -1] = -math.inf
    ids = score.topk(case.top_k, dim=1).indices.to(torch.int32)
    if case.routing == "one":
        ids[:] = 2
    if case.routing == "padding":
        ids[:] = -1
    if case.tokens > 1:
        ids[1, 0] = -1
    return {
        "hidden_states": normal(case.tokens, case.hidden),
        "w13": normal(case.experts, 2 * case.intermediate, case.hidden) / math.sqrt(case.hidden),
        "w2": normal(case.experts, case.hidden, case.intermediate) / math.sqrt(case.intermediate),
        "topk_weights": torch.rand(case.tokens, case.top_k, generator=g, device=device),
        "topk_ids": ids,
    }


def exact(a: dict[str, Any], on_input: bool = False) -> torch.Tensor:
    """The layer in float64 on the device of the arguments."""
    x = a["hidden_states"].double()
    out = torch.zeros_like(x)
    for expert in range(a["w13"].shape[0]):
        w13, w2 = a["w13"][expert].double(), a["w2"][expert].double()
        rows, choices = (a["topk_ids"] == expert).nonzero(as_tuple=True)
        weight = a["topk_weights"][rows, choices, None].double()
        gate, up = (x[rows] * (weight if on_input else 1) @ w13.T).chunk(2, dim=1)
        y = (torch.nn.functional.silu(gate) * up) @ w2.T
        out.index_add_(0, rows, y if on_input else y * weight)
    return out


# An activation half-way between two fp8 numbers may be rounded either way, which shows in a whole row.
FLIPPED = 40.0


def assert_close(got: torch.Tensor, want: torch.Tensor, worst: float = 8.0) -> None:
    """RMS and maximum error relative to the RMS of ``want``, with the worst coordinates.

    The maximum may be ``worst`` times the RMS that is allowed. The interpreter truncates float32 to bf16
    where a device rounds, which doubles the error.
    """
    rms = torch.finfo(got.dtype).eps * (2 if INTERPRET else 0.75)
    assert got.shape == want.shape and bool(got.isfinite().all())
    if want.numel() == 0 or not bool(want.any()):
        assert not bool(got.any())
        return
    scale = want.square().mean().sqrt()
    error = (got.double() - want).abs() / scale
    at = [divmod(int(i), want.shape[1]) for i in error.flatten().topk(min(5, error.numel())).indices]
    report = "\n".join(f"{at}: got {float(got[at])}, want {float(want[at])}" for at in at)
    assert error.square().mean().sqrt() < rms and error.max() < worst * rms, f"max {error.max()}\n{report}"


def poisoned(workspace: Workspace) -> Workspace:
    for tensor in workspace.tensors():
        tensor.fill_(math.nan if tensor.is_floating_point() else 1 << 20)
    return workspace


@kernels_run
@cases
def test_agrees_with_float64_and_adds_hits(case: Case) -> None:
    a = make(case)
    hits = torch.full((case.experts,), 5, dtype=torch.int32, device=DEVICE)
    assert_close(fused_moe(**a, hits=hits), exact(a))
    chosen = a["topk_ids"][a["topk_ids"] >= 0].long()
    assert torch.equal(hits.long(), 5 + torch.bincount(chosen, minlength=case.experts))


@kernels_run
@pytest.mark.parametrize("name", ["few, odd sizes", "odd sizes", "top-1", "fp16"])
def test_router_weight_on_the_input(name: str) -> None:
    a = make(CASES[name])
    assert_close(fused_moe(**a, apply_router_weight_on_input=True), exact(a, on_input=True))


@kernels_run
def test_out_may_be_the_input() -> None:
    a = make(Case())
    want = fused_moe(**a)
    assert torch.equal(fused_moe(**a, out=a["hidden_states"]), want)


def in_records(a: dict[str, Any], order: torch.Tensor, spare: int, gap: int) -> dict[str, Any]:
    """The same layer with its experts in slots ``order`` of interleaved records, all else NaN."""
    experts, first, second = a["w13"].shape[0], a["w13"][0].numel(), a["w2"][0].numel()
    slab = torch.full((experts + spare, first + second + gap), math.nan, dtype=a["w13"].dtype, device=DEVICE)
    slab[order, :first] = a["w13"].flatten(1)
    slab[order, first : first + second] = a["w2"].flatten(1)
    (rows, hidden), intermediate = a["w13"].shape[1:], a["w2"].shape[2]
    stride = slab.stride(0)
    w13 = slab.as_strided((experts + spare, rows, hidden), (stride, hidden, 1))
    w2 = slab.as_strided((experts + spare, hidden, intermediate), (stride, intermediate, 1), first)
    return {**a, "w13": w13, "w2": w2, "slot_table": order.to(torch.int32)}


@kernels_run
@cases
def test_slots_strides_and_scratch_do_not_change_a_bit(case: Case) -> None:
    a, workspace = make(case), Workspace(torch.device(DEVICE))
    want = fused_moe(**a, workspace=workspace)
    order = torch.randperm(case.experts + 3, generator=torch.Generator().manual_seed(1))[: case.experts]
    moved, out = in_records(a, order.to(DEVICE), spare=3, gap=24), torch.full_like(want, math.nan)
    got = fused_moe(**moved, workspace=poisoned(workspace), out=out)
    assert got is out and torch.equal(got, want)


GEMMS = {
    "swap": GemmLaunch(16, 64, 16, 4, 2, swap_ab=True),
    "TMA": GemmLaunch(16, 64, 32, 4, 2, tma=True),
    "TMA, swap": GemmLaunch(32, 64, 32, 4, 3, swap_ab=True, tma=True),
    "wide": GemmLaunch(64, 128, 64, 8, 3),
    "small tiles": GemmLaunch(64, 64, 16, 4, 2, small_m=16),
    "span": GemmLaunch(16, 16, 32, 4, 2, span=2),
    "span, steps": GemmLaunch(16, 16, 16, 4, 2, span=2),
    "span, small tiles, swap, TMA": GemmLaunch(32, 64, 64, 4, 2, True, True, small_m=16, span=4),
}


@kernels_run
@pytest.mark.parametrize("gemm", GEMMS.values(), ids=GEMMS.keys())
@pytest.mark.parametrize(
    "case", [Case(tokens=30, experts=9, routing="skewed"), CASES["odd sizes"]], ids=["skewed", "odd sizes"]
)
def test_every_kind_of_launch(case: Case, gemm: GemmLaunch) -> None:
    if INTERPRET and case.routing == "skewed" and (gemm.span > 1 or gemm.small_m):
        pytest.skip("a GPU runs it; the interpreter does at odd sizes")
    a = make(case)
    assert_close(fused_moe(**a, launch=MoeLaunch(gemm, gemm)), exact(a))
    order = torch.arange(case.experts - 1, -1, -1, device=DEVICE)
    moved = in_records(a, order, spare=0, gap=8)
    assert_close(fused_moe(**moved, launch=MoeLaunch(gemm, gemm)), exact(a))


@kernels_run
def test_gemv_of_many_tokens_and_short_steps() -> None:
    a = make(Case(4, 7, 3, 37, 19))
    assert_close(fused_moe(**a, launch=MoeLaunch(GemvLaunch(8, 16, 4), GemvLaunch(16, 8, 4))), exact(a))


PARTS = {
    "parts": (GemmLaunch(64, 32, 32, 4, 2), GemmLaunch(16, 64, 16, 4, 2)),
    "parts, small, span": (
        GemmLaunch(64, 32, 32, 4, 2, small_m=16),
        GemmLaunch(32, 16, 32, 4, 2, True, True, small_m=16, span=2),
    ),
}


@kernels_run
@pytest.mark.parametrize(("gate_up", "down"), PARTS.values(), ids=PARTS.keys())
def test_down_takes_parts_of_tiles(gate_up: GemmLaunch, down: GemmLaunch) -> None:
    a = make(case := Case(tokens=50, experts=4, routing="skewed"))
    workspace = Workspace(torch.device(DEVICE))
    want = fused_moe(**a, launch=MoeLaunch(gate_up, down), workspace=workspace)
    assert_close(want, exact(a))
    host = torch.arange(case.experts, device=DEVICE) < 1
    launch = MoeLaunch(gate_up, down)
    got = fused_moe(**a, launch=launch, workspace=poisoned(workspace), host_experts=host)
    assert torch.equal(got, want)


FP8_GEMM = GemmLaunch(16, 128, 128, 4, 2)
FP8_LAUNCHES = {
    "GEMV": (Case(2, 4, 2, 256, 128), MoeLaunch(GemvLaunch(64, 128, 4), GemvLaunch(128, 128, 4))),
    "GEMV, uneven steps": (
        Case(2, 3, 1, 384, 384),
        MoeLaunch(GemvLaunch(128, 512, 4), GemvLaunch(128, 256, 4)),
    ),
    "GEMM": (Case(9, 4, 2, 256, 256), None),
    "span": (Case(9, 3, 2, 384, 256), MoeLaunch(FP8_GEMM, replace(FP8_GEMM, block_n=64, span=4))),
    "parts of tiles": (Case(40, 3, 2, 256, 256), MoeLaunch(replace(FP8_GEMM, block_m=64), FP8_GEMM)),
    "swap, TMA, small tiles, span over one group": (
        Case(30, 3, 2, 256, 128, "skewed"),
        MoeLaunch(
            GemmLaunch(32, 128, 128, 4, 3, swap_ab=True, tma=True, small_m=16),
            GemmLaunch(32, 64, 128, 4, 2, swap_ab=True, tma=True, small_m=16, span=4),
        ),
    ),
}
fp8_launches = pytest.mark.parametrize(("case", "launch"), FP8_LAUNCHES.values(), ids=FP8_LAUNCHES.keys())


@kernels_run
@fp8_launches
def test_fp8_agrees_with_float64(case: Case, launch: MoeLaunch | None) -> None:
    a = moe_fp8.to_fp8(make(case))
    assert_close(fused_moe(**a, launch=launch), moe_fp8.exact(a), worst=FLIPPED)


@kernels_run
@pytest.mark.parametrize("name", ["GEMV", "GEMM"])
def test_fp8_with_the_router_weight_on_the_input(name: str) -> None:
    case, launch = FP8_LAUNCHES[name]
    a = moe_fp8.to_fp8(make(case))
    assert_close(
        fused_moe(**a, apply_router_weight_on_input=True, launch=launch),
        moe_fp8.exact(a, True),
        worst=FLIPPED,
    )


@kernels_run
@pytest.mark.parametrize("name", ["GEMV", "swap, TMA, small tiles, span over one group"])
def test_fp8_scales_are_by_expert_and_scratch_does_not_show(name: str) -> None:
    case, launch = FP8_LAUNCHES[name]
    a, workspace = moe_fp8.to_fp8(make(case)), Workspace(torch.device(DEVICE))
    want = fused_moe(**a, launch=launch, workspace=workspace)
    moved = in_records(a, torch.arange(case.experts, 0, -1, device=DEVICE), spare=1, gap=48)
    assert torch.equal(fused_moe(**moved, launch=launch, workspace=poisoned(workspace)), want)


@kernels_run
def test_quantised_values_are_those_of_the_reference() -> None:
    from vamp_kernels.quantize import quantize, quantize_torch

    g = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(7, 384, generator=g, device=DEVICE) * torch.logspace(-12, 3, 7, device=DEVICE)[:, None]
    x[2, :128] = 0
    x = torch.stack([x, x], dim=1).bfloat16()[:, 0]  # rows apart
    got, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=DEVICE), x.new_empty(7, 3).float()
    quantize(x, got, scales, block=4)
    want, want_scales = quantize_torch(x)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)) and torch.equal(scales, want_scales)
    assert bool((got[1:2].float().abs() == 448).any()) and not bool(got.float().isnan().any())


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (MoeLaunch(*[GemmLaunch(16, 64, 128, 4, 2)] * 2), "launch has block_n 64 and block_k 128"),
        (MoeLaunch(*[GemmLaunch(16, 128, 64, 4, 2)] * 2), "launch has block_n 128 and block_k 64"),
        (MoeLaunch(GemvLaunch(1, 64, 1), GemvLaunch(1, 128, 1)), "launch has block_n 1 and block_k 64"),
    ],
)
@kernels_run
def test_fp8_launches_follow_the_blocks_of_scales(launch: MoeLaunch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_moe(**moe_fp8.to_fp8(make(Case(2, 3, 2, 256, 128))), launch=launch)


@kernels_run
def test_launches_stand_in_their_ranges() -> None:
    seen: list[str] = []

    @contextmanager
    def named(name: str) -> Iterator[None]:
        seen.append(name)
        yield
        seen.append(f"/{name}")

    few, many = make(Case(tokens=1, intermediate=4)), make(Case())
    staged = moe_fp8.to_fp8(make(Case(17, 1, 1, 128, 128)))
    staged |= {name: torch.cat([staged[name]] * 2) for name in ("w13", "w2")}
    staged["slot_table"] = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    staged["host_experts"] = staged["slot_table"] == 0
    staged["staging_slots"] = staged["slot_table"] + 1
    staged["launch"] = MoeLaunch(FP8_GEMM, FP8_GEMM)
    ranges.install(named)
    try:
        for arguments in (few, many, staged):
            fused_moe(**arguments)
    finally:
        ranges.install(None)
    fused_moe(**few)
    inside = [
        ("up", "down"),
        ("route", "up", "down", "combine"),
        ("quantize", "route", "copy", "copy", "up", "down", "up", "down", "combine"),
    ]
    words = [[word for stage in stages for word in (stage, f"/{stage}")] for stages in inside]
    assert seen == [word for stages in words for word in ("layer", *stages, "/layer")]


@kernels_run
@pytest.mark.parametrize("pairs_in_one_launch", [0, 1 << 20], ids=["three launches", "one launch"])
@pytest.mark.parametrize(
    ("staging", "stage_all"),
    [(None, False), (0, False), (2, False), (40, False), (2, True), (40, True)],
    ids=["no mask", "mask", "few slots", "enough slots", "all, few slots", "all, enough slots"],
)
@pytest.mark.parametrize(
    ("tokens", "experts", "block_m"), [(1, 3, 16), (300, 5, 16), (211, 40, 32), (700, 2, 64)]
)
def test_routing_is_that_of_the_reference(
    pairs_in_one_launch: int,
    staging: int | None,
    stage_all: bool,
    tokens: int,
    experts: int,
    block_m: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vamp_kernels import route

    monkeypatch.setattr(route, "ONE_LAUNCH_PAIRS", pairs_in_one_launch)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, experts, (tokens, 3), generator=g)
    ids[ids == 1] = 0
    slots = torch.randperm(experts, generator=g)
    host = None if staging is None else torch.rand(experts, generator=g) < 0.6
    free = torch.arange(experts, experts + staging).to(torch.int32) if staging else None
    want = route.route_torch(ids, experts, block_m, slots, host, free, stage_all)
    host, free = (None if t is None else t.to(DEVICE) for t in (host, free))
    hits = torch.zeros(experts, dtype=torch.int64, device=DEVICE)
    workspace = Workspace(torch.device(DEVICE))
    routed = route.route(
        ids.to(DEVICE),
        experts,
        block_m,
        workspace,
        slots.to(DEVICE),
        hits,
        host_experts=host,
        staging_slots=free,
        stage_all=stage_all,
    )
    assert routed.tile_count.tolist() == want.tile_count and len(want.tiles) <= routed.tiles.shape[1]
    assert [tuple(t) for t in routed.tiles[:, : len(want.tiles)].T.tolist()] == want.tiles
    assert routed.pairs[: len(want.pairs)].tolist() == want.pairs
    assert hits.tolist() == want.hits
    if routed.copies is not None:
        assert routed.copy_count is not None
        assert [tuple(c) for c in routed.copies[:, : int(routed.copy_count)].T.tolist()] == want.copies


@kernels_run
@pytest.mark.parametrize(
    ("block_m", "mask", "staging", "fp8"),
    [
        pytest.param(16, (), 2, False, id="no expert"),
        pytest.param(16, range(6), 0, False, id="no slot"),
        pytest.param(16, range(6), 1, False, id="too few slots"),
        pytest.param(16, range(6), 1, True, id="too few slots, fp8"),
        pytest.param(16, (0, 2, 3, 4), 6, False, id="enough slots"),
        pytest.param(64, (0, 2, 3, 4), 6, False, id="one tile each"),
        pytest.param(64, (0, 2, 3, 4), 6, True, id="one tile each, fp8"),
        pytest.param(128, (), 2, False, id="tall tiles, no expert"),
        pytest.param(128, (0, 2, 3, 5), 6, False, id="tall tiles, enough slots"),
        pytest.param(128, range(6), 2, False, id="tall tiles, too few slots"),
        pytest.param(128, range(6), 2, True, id="tall tiles, too few slots, fp8"),
    ],
)
def test_host_memory_does_not_change_a_bit(
    block_m: int, mask: Sequence[int], staging: int, fp8: bool
) -> None:
    case = Case(tokens=36, hidden=24, intermediate=16, routing="skewed")
    part = min(block_m, 64)
    launch = MoeLaunch(GemmLaunch(block_m, 16, 32, 4, 2), GemmLaunch(part, 16, 32, 4, 2, span=2))
    a = make(case)
    if fp8:
        a = moe_fp8.to_fp8(make(replace(case, hidden=256, intermediate=128)))
        launch = MoeLaunch(GemmLaunch(block_m, 128, 128, 4, 2), GemmLaunch(part, 64, 128, 4, 2, span=2))
    host = torch.zeros(6, dtype=torch.bool, device=DEVICE)
    host[list(mask)] = True
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))[:6]
    moved = in_records(a, order.to(DEVICE), spare=2 + staging, gap=48)
    spare = torch.arange(8, 8 + staging, dtype=torch.int32, device=DEVICE)
    got = fused_moe(**moved, host_experts=host, staging_slots=spare, launch=launch)
    assert torch.equal(got, fused_moe(**a, launch=launch))
    rows = torch.bincount(a["topk_ids"][a["topk_ids"] >= 0].long(), minlength=6)
    in_place = {16: 16, 64: 64, 128: 0}[block_m]  # most rows of an expert that is
    staged = [expert for expert in mask if rows[expert] > in_place][:staging]
    assert bool(staged) == (block_m != 64 and bool(mask) and staging > 0)
    for slot, expert in enumerate(staged, start=8):
        assert torch.equal(moved["w13"][slot].float(), a["w13"][expert].float())
        assert torch.equal(moved["w2"][slot].float(), a["w2"][expert].float())
    assert bool(moved["w13"][8 + len(staged) :].float().isnan().all())


@kernels_run
@pytest.mark.parametrize("block_m", [16, 128], ids=["some staged", "all staged"])
@pytest.mark.parametrize("slots", [[-1, -1, -1], [8, -1, -1], [8, 9, -1]], ids=["none", "one", "two"])
def test_no_more_is_staged_than_there_are_slots_now(block_m: int, slots: list[int]) -> None:
    """What a captured graph holds is the address of the list, so that it can be given fewer."""
    case = Case(tokens=36, hidden=24, intermediate=16, routing="skewed")
    gemm = GemmLaunch(block_m, 16, 32, 4, 2)
    launch = MoeLaunch(gemm, replace(gemm, block_m=min(block_m, 64), span=2))
    a = make(case)
    moved = in_records(a, torch.arange(6, device=DEVICE), spare=5, gap=48)
    given = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    host = torch.ones(6, dtype=torch.bool, device=DEVICE)
    got = fused_moe(**moved, host_experts=host, staging_slots=given, launch=launch)
    assert torch.equal(got, fused_moe(**a, launch=launch))
    written = [slot for slot in range(6, 11) if not bool(moved["w13"][slot].float().isnan().any())]
    assert written == [slot for slot in slots if slot >= 0]


@kernels_run
@pytest.mark.parametrize("staged", [False, True], ids=["read in place", "staged"])
def test_a_launch_takes_its_own_tiles_only(staged: bool) -> None:
    from vamp_kernels import down, gate_up, route

    a, gemm = (
        make(Case(tokens=36, hidden=24, intermediate=16, routing="skewed")),
        GemmLaunch(16, 16, 32, 4, 2),
    )
    host = torch.tensor([True, False, True, True, True, False], device=DEVICE)
    # Nothing is copied here: the staging slots are those of other experts.
    slots = torch.tensor([1, 5], dtype=torch.int32, device=DEVICE)
    workspace = Workspace(torch.device(DEVICE))
    routing = route.route(a["topk_ids"], 6, gemm.block_m, workspace, host_experts=host, staging_slots=slots)
    _, direct_end, end = routing.tile_count.tolist()
    mine = range(direct_end, end) if staged else range(direct_end)
    rows = [row for i in mine for row in range(int(routing.tiles[2, i]), int(routing.tiles[3, i]))]
    pairs = routing.pairs[rows].tolist()
    act = torch.full((108, 16), math.nan, dtype=torch.bfloat16, device=DEVICE)
    gate_up.gate_up(a["hidden_states"], a["w13"], a["topk_weights"], routing, act, gemm, staged=staged)
    assert act.isfinite().all(1).nonzero().flatten().tolist() == sorted(rows) != []
    partial = torch.full((108, 24), math.nan, dtype=torch.bfloat16, device=DEVICE)
    down.down(act, a["w2"], a["topk_weights"], routing, partial, gemm, staged=staged)
    assert partial.isfinite().all(1).nonzero().flatten().tolist() == sorted(pairs)


@kernels_run
def test_combine_takes_the_tokens_with_or_without_a_host_backed_expert() -> None:
    from vamp_kernels.combine import combine

    a = make(Case(tokens=11, experts=20, top_k=3))
    host = torch.arange(20, device=DEVICE) < 6
    a["topk_ids"][4] = -1
    partial = torch.randn(33, 48, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    want, got = (torch.full((11, 48), math.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    combine(partial, a["topk_ids"], want)
    chose = (host[a["topk_ids"].long().clamp(min=0)] & (a["topk_ids"] >= 0)).any(1)
    combine(partial, a["topk_ids"], got, host_experts=host, hosted=True)
    assert torch.equal(got.isfinite().all(1), chose) and 0 < int(chose.sum()) < 10
    combine(partial, a["topk_ids"], got, host_experts=host, hosted=False)
    assert torch.equal(got, want)


@kernels_run
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("hosted", [0, 1, 2, 4], ids=lambda n: f"{n} experts")
def test_few_tokens_and_host_memory(hosted: int, fp8: bool) -> None:
    case, launch = Case(4, 5, 2, 256, 128), FP8_LAUNCHES["GEMV"][1]
    if not fp8:
        case, launch = replace(case, hidden=40, intermediate=12), MoeLaunch(*[GemvLaunch(8, 16, 1)] * 2)
    a = make(case)
    a["topk_ids"][:, 1] = torch.tensor([1, -1, 0, 1])  # the last token has one expert twice
    a["topk_ids"][3, 0] = 1
    host = torch.arange(case.experts, device=DEVICE) < hosted
    hits = torch.zeros(case.experts, dtype=torch.int64, device=DEVICE)
    a = moe_fp8.to_fp8(a) if fp8 else a
    got = fused_moe(**a, host_experts=host, hits=hits, launch=launch)
    assert torch.equal(got, fused_moe(**a, launch=launch))
    chosen = a["topk_ids"][a["topk_ids"] >= 0].long()
    assert torch.equal(hits, torch.bincount(chosen, minlength=case.experts))


@kernels_run
@pytest.mark.parametrize("size", [8, 1000], ids=["less than a block", "blocks and a rest"])
def test_gather_is_that_of_the_reference(size: int) -> None:
    from vamp_kernels.gather import gather, gather_torch
    from vamp_kernels.launch import GatherLaunch

    slab = torch.randn(9, size + 16, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    copies = torch.tensor([[4, 0, 7, 1], [2, 8, 3, 5]], dtype=torch.int32, device=DEVICE)
    for count in (0, 3, 4):
        want, got = slab.clone(), slab.clone()
        how_many = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        gather_torch(want[:, 8 : 8 + size], copies, how_many)
        gather(got[:, 8 : 8 + size], copies, how_many, GatherLaunch(3, 512, 4, 2))
        assert torch.equal(got, want)


@kernels_run
@pytest.mark.parametrize("case", [CASES["odd sizes"], CASES["few, odd sizes"]], ids=["odd sizes", "few"])
def test_slots_that_cannot_be_copied_are_refused(case: Case) -> None:
    host = torch.zeros(case.experts, dtype=torch.bool, device=DEVICE)
    spare = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"^w13 has a slot stride of .* bytes, expected a multiple of 16"):
        fused_moe(**make(case), host_experts=host, staging_slots=spare)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("hidden_states", lambda t: t.float()),
        ("topk_ids", lambda t: t.T.contiguous().T),
        ("topk_weights", lambda t: t.T.contiguous().T),
        ("w13", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
        ("slot_table", lambda t: torch.stack([t, t], 1)[:, 0]),
        ("out", lambda t: t[1:]),
        ("out", lambda t: t.float()),
        ("out", lambda t: t[:1].expand(t.shape)),
        ("w13", lambda t: t[:0]),
        ("hits", lambda t: t[1:]),
        ("hits", lambda t: t.float()),
        ("host_experts", lambda t: t.int()),
        ("host_experts", lambda t: t[1:]),
        ("staging_slots", lambda t: t.long()),
        ("staging_slots", lambda t: t[None]),
        ("w2", lambda t: t.to("meta")),
    ],
)
def test_an_argument_that_the_kernels_cannot_take_is_named(name: str, change: Any) -> None:
    a = make(Case(), device="cpu")
    a |= {
        "slot_table": torch.arange(6),
        "out": a["hidden_states"].clone(),
        "hits": torch.zeros(6, dtype=torch.int64),
        "host_experts": torch.zeros(6, dtype=torch.bool),
        "staging_slots": torch.arange(2, dtype=torch.int32),
    }
    a[name] = change(a[name])
    if name == "hidden_states":
        a |= {"w13": a["w13"].float(), "w2": a["w2"].float()}
    if len(a["w13"]) == 0:
        a["w2"] = a["w2"][:0]
    with pytest.raises(ValueError, match=f"^{name} "):
        fused_moe(**a)


@kernels_run
def test_a_workspace_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^workspace is on meta, expected "):
        fused_moe(**make(Case()), workspace=Workspace(torch.device("meta")))


@pytest.mark.skipif(INTERPRET, reason="a CPU will do for the interpreter")
def test_a_device_that_no_kernel_runs_on_is_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"^hidden_states is on cpu, expected cuda, or cpu with TRITON_INT"):
        fused_moe(**make(Case(), device="cpu"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("w13_scale", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
        ("w2_scale", lambda t: t.to("meta")),
    ],
)
def test_a_scale_that_the_kernels_cannot_take_is_named(name: str, change: Any) -> None:
    a = moe_fp8.to_fp8(make(Case(2, 3, 2, 256, 256), device="cpu"))
    a[name] = change(a[name])
    with pytest.raises(ValueError, match=f"^{name} "):
        fused_moe(**a)


@pytest.mark.skipif(INTERPRET or CUDA, reason="the kernels run in this process")
def test_the_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).parents[2]
    child = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stdout[-3000:]


gpu = pytest.mark.gpu
large = pytest.mark.parametrize("case", LARGE.values(), ids=LARGE.keys())
LARGE_FP8 = {name: case for name, case in LARGE.items() if not case.intermediate % 128}
large_fp8 = pytest.mark.parametrize("case", LARGE_FP8.values(), ids=LARGE_FP8.keys())


@gpu
@large
def test_real_sizes_agree_with_float64(case: Case) -> None:
    a = make(case)
    assert_close(fused_moe(**a), exact(a))


@gpu
@large
def test_real_sizes_do_not_depend_on_slots(case: Case) -> None:
    a = make(case)
    order = torch.randperm(case.experts + 3, generator=torch.Generator().manual_seed(1))[: case.experts]
    assert torch.equal(fused_moe(**in_records(a, order.to(DEVICE), spare=3, gap=64)), fused_moe(**a))


@gpu
@large_fp8
def test_real_sizes_in_fp8_agree_with_float64(case: Case) -> None:
    a = moe_fp8.to_fp8(make(case))
    assert_close(fused_moe(**a), moe_fp8.exact(a), worst=FLIPPED)


@gpu
@large_fp8
def test_real_sizes_in_fp8_do_not_depend_on_slots(case: Case) -> None:
    a = moe_fp8.to_fp8(make(case))
    order = torch.randperm(case.experts + 3, generator=torch.Generator().manual_seed(1))[: case.experts]
    assert torch.equal(fused_moe(**in_records(a, order.to(DEVICE), spare=3, gap=64)), fused_moe(**a))


@gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 4, 64, 2048])
def test_a_graph_replays_and_allocates_nothing(tokens: int, fp8: bool) -> None:
    a, b = (make(Case(tokens, 64, 4, 256, 128), seed) for seed in (0, 1))
    if fp8:
        a, b = moe_fp8.to_fp8(a), moe_fp8.to_fp8(b)
    workspace, out = Workspace(torch.device("cuda")), torch.empty_like(a["hidden_states"])
    hits = torch.zeros(64, dtype=torch.int32, device="cuda")
    fused_moe(**a, workspace=workspace, out=out, hits=hits)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    fused_moe(**a, workspace=workspace, out=out, hits=hits)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_moe(**a, workspace=workspace, out=out, hits=hits)
    for name, tensor in b.items():
        a[name].copy_(tensor)
    poisoned(workspace)
    out.fill_(math.nan)
    for _ in range(3):
        graph.replay()
    assert torch.equal(out, fused_moe(**b))


@gpu
def test_slots_beyond_the_32_bit_range() -> None:
    case = Case(64, 8, 2, 1024, 512)
    a = make(case)
    record = 3 * case.hidden * case.intermediate
    slots = (1 << 32) // record + 2
    slab = torch.empty(slots * record, dtype=case.dtype, device="cuda")
    w13 = slab.as_strided((slots, 2 * case.intermediate, case.hidden), (record, case.hidden, 1))
    w2 = slab.as_strided(
        (slots, case.hidden, case.intermediate),
        (record, case.intermediate, 1),
        2 * case.hidden * case.intermediate,
    )
    table = torch.arange(slots - case.experts, slots, dtype=torch.int32, device="cuda")
    w13[table.long()], w2[table.long()] = a["w13"], a["w2"]
    for tokens in (3, 64):
        some = {name: a[name][:tokens] for name in ("hidden_states", "topk_weights", "topk_ids")}
        want = fused_moe(**some, w13=a["w13"], w2=a["w2"])
        assert torch.equal(fused_moe(**some, w13=w13, w2=w2, slot_table=table), want)


@gpu
def test_agrees_with_the_torch_reference() -> None:
    a = make(replace(LARGE["TP4"], tokens=40))
    torch.testing.assert_close(fused_moe(**a).float(), fused_moe_torch(**a).float(), rtol=2e-2, atol=2e-2)
