from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

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


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """RMS and maximum error relative to the RMS of ``want``, with the worst coordinates.

    The interpreter truncates float32 to bf16 where a device rounds, which doubles the error.
    """
    rms = torch.finfo(got.dtype).eps * (2 if INTERPRET else 0.75)
    worst = 8 * rms
    assert got.shape == want.shape and bool(got.isfinite().all())
    if want.numel() == 0 or not bool(want.any()):
        assert not bool(got.any())
        return
    scale = want.square().mean().sqrt()
    error = (got.double() - want).abs() / scale
    at = [divmod(int(i), want.shape[1]) for i in error.flatten().topk(min(5, error.numel())).indices]
    report = "\n".join(f"{at}: got {float(got[at])}, want {float(want[at])}" for at in at)
    assert error.square().mean().sqrt() < rms and error.max() < worst, f"max {error.max()}\n{report}"


def poisoned(workspace: Workspace) -> Workspace:
    for tensor in workspace.tensors():
        tensor.fill_(math.nan if tensor.is_floating_point() else 1 << 20)
    return workspace


@kernels_run
@cases
@pytest.mark.parametrize("on_input", [False, True], ids=["weight on output", "weight on input"])
def test_agrees_with_float64(case: Case, on_input: bool) -> None:
    a = make(case)
    assert_close(fused_moe(**a, apply_router_weight_on_input=on_input), exact(a, on_input))


@kernels_run
@cases
def test_poisoned_scratch_and_output_do_not_show(case: Case) -> None:
    a, workspace = make(case), Workspace(torch.device(DEVICE))
    want = fused_moe(**a, workspace=workspace)
    out = torch.full_like(want, math.nan)
    got = fused_moe(**a, workspace=poisoned(workspace), out=out)
    assert got is out and torch.equal(got, want)


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
def test_slots_and_strides_do_not_change_a_bit(case: Case) -> None:
    a = make(case)
    order = torch.randperm(case.experts + 3, generator=torch.Generator().manual_seed(1))[: case.experts]
    assert torch.equal(fused_moe(**in_records(a, order.to(DEVICE), spare=3, gap=24)), fused_moe(**a))


@kernels_run
@cases
def test_hits_are_added(case: Case) -> None:
    a = make(case)
    hits = torch.full((case.experts,), 5, dtype=torch.int32, device=DEVICE)
    fused_moe(**a, hits=hits)
    chosen = a["topk_ids"][a["topk_ids"] >= 0].long()
    assert torch.equal(hits.long(), 5 + torch.bincount(chosen, minlength=case.experts))


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
    a = make(case)
    assert_close(fused_moe(**a, launch=MoeLaunch(gemm, gemm)), exact(a))
    order = torch.arange(case.experts - 1, -1, -1, device=DEVICE)
    moved = in_records(a, order, spare=0, gap=8)
    assert_close(fused_moe(**moved, launch=MoeLaunch(gemm, gemm)), exact(a))


@kernels_run
def test_gemv_of_many_tokens_and_short_steps() -> None:
    a = make(Case(4, 7, 3, 37, 19))
    assert_close(fused_moe(**a, launch=MoeLaunch(GemvLaunch(8, 16, 4), GemvLaunch(16, 8, 4))), exact(a))


@kernels_run
@pytest.mark.parametrize("pairs_in_one_launch", [0, 1 << 20], ids=["three launches", "one launch"])
@pytest.mark.parametrize(
    ("tokens", "experts", "block_m"), [(1, 3, 16), (300, 5, 16), (211, 40, 32), (700, 2, 64)]
)
def test_routing_is_that_of_the_reference(
    pairs_in_one_launch: int, tokens: int, experts: int, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vamp_kernels import route

    monkeypatch.setattr(route, "ONE_LAUNCH_PAIRS", pairs_in_one_launch)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, experts, (tokens, 3), generator=g)
    ids[ids == 1] = 0
    slots = torch.randperm(experts, generator=g)
    hits = torch.zeros(experts, dtype=torch.int64, device=DEVICE)
    workspace = Workspace(torch.device(DEVICE))
    routed = route.route(ids.to(DEVICE), experts, block_m, workspace, slots.to(DEVICE), hits)
    pairs, tiles, want_hits = route.route_torch(ids, experts, block_m, slots)
    count = int(routed.tile_count)
    assert count == len(tiles) <= routed.tiles.shape[1]
    assert [tuple(t) for t in routed.tiles[:, :count].T.tolist()] == tiles
    assert routed.pairs[: len(pairs)].tolist() == pairs
    assert hits.tolist() == want_hits


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
        ("hits", lambda t: t[1:]),
        ("hits", lambda t: t.float()),
        ("w2", lambda t: t.to("meta")),
    ],
)
def test_an_argument_that_the_kernels_cannot_take_is_named(name: str, change: Any) -> None:
    a = make(Case(), device="cpu")
    a |= {
        "slot_table": torch.arange(6),
        "out": a["hidden_states"].clone(),
        "hits": torch.zeros(6, dtype=torch.int64),
    }
    a[name] = change(a[name])
    if name == "hidden_states":
        a |= {"w13": a["w13"].float(), "w2": a["w2"].float()}
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
@pytest.mark.parametrize("tokens", [1, 4, 64, 2048])
def test_a_graph_replays_and_allocates_nothing(tokens: int) -> None:
    a, b = (make(Case(tokens, 64, 4, 256, 128), seed) for seed in (0, 1))
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
