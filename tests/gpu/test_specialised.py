"""The warp-specialised GEMMs against the plain ones, which other tests hold against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from vamp_kernels.fused_moe import fused_moe
from vamp_kernels.launch import GemmLaunch, MoeLaunch, SpecialisedLaunch, choose_launch, device_limits
from vamp_kernels.workspace import Workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and device_limits(torch.device("cuda", 0)).specialised),
        reason="needs compute capability 9.0 and a Triton with what the specialised kernels use",
    ),
]

HIDDEN = 2048
PLAIN = MoeLaunch(GemmLaunch(64, 64, 64, 4, 3, tma=True), GemmLaunch(64, 64, 64, 4, 3, tma=True))
TALL = MoeLaunch(SpecialisedLaunch(192, 64, 5), SpecialisedLaunch(192, 128, 5))
LOW = MoeLaunch(SpecialisedLaunch(128, 128, 4), SpecialisedLaunch(128, 256, 4))
MIXED = MoeLaunch(SpecialisedLaunch(128, 128, 4), GemmLaunch(128, 64, 64, 8, 3, tma=True, small_m=64))
LAUNCHES = {"tall": TALL, "low": LOW, "mixed": MIXED}
launches = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
EDGES = [0, 1, 63, 64, 65, 0, 127, 128, 129, 191, 192, 193, 383, 385, 5000, 0]


def layer(
    ids: torch.Tensor, experts: int, intermediate: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, Any]:
    """Arguments with random weights and inputs for the routing ``ids``."""
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda", dtype=dtype)

    return {
        "hidden_states": normal(len(ids), HIDDEN),
        "w13": normal(experts, 2 * intermediate, HIDDEN) / math.sqrt(HIDDEN),
        "w2": normal(experts, HIDDEN, intermediate) / math.sqrt(intermediate),
        "topk_weights": torch.rand(ids.shape, generator=g, device="cuda"),
        "topk_ids": ids,
    }


def routed(rows: list[int], top_k: int, seed: int = 0) -> torch.Tensor:
    """A routing that gives each expert so many rows, with some padding, in random order."""
    pairs = [torch.full((n,), expert) for expert, n in enumerate(rows)]
    padding = torch.full((top_k + -sum(rows) % top_k,), -1)
    flat = torch.cat([*pairs, padding]).to(torch.int32)
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))
    return flat[order].view(-1, top_k).cuda()


def skewed(tokens: int, experts: int, top_k: int, skew: float, g: torch.Generator) -> torch.Tensor:
    score = torch.rand(tokens, experts, generator=g, device="cuda")
    score += skew * torch.randn(experts, generator=g, device="cuda")
    ids = score.topk(top_k, dim=1).indices.to(torch.int32)
    ids[torch.rand(ids.shape, generator=g, device="cuda") < 0.02] = -1
    return ids


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Both round in two places; what is left is the order of sums."""
    error, scale = (got.double() - want.double()).abs(), want.double().square().mean().sqrt()
    eps = torch.finfo(got.dtype).eps
    assert bool(got.isfinite().all())
    assert error.square().mean().sqrt() < 0.5 * eps * scale and error.max() < 16 * eps * scale


@launches
@pytest.mark.parametrize("intermediate", [512, 256, 128])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight on output", "weight on input"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_any_number_of_rows(launch: MoeLaunch, intermediate: int, on_input: bool, dtype: torch.dtype) -> None:
    a = layer(routed(EDGES, 5), len(EDGES), intermediate, dtype)
    workspace = Workspace(torch.device("cuda"))
    want = fused_moe(**a, apply_router_weight_on_input=on_input, launch=PLAIN)
    for _ in range(2):
        got = fused_moe(**a, apply_router_weight_on_input=on_input, launch=launch, workspace=workspace)
        assert_near(got, want)
        for tensor in workspace.tensors():
            tensor.fill_(math.nan if tensor.is_floating_point() else 1 << 20)


@launches
@pytest.mark.parametrize("staging", [None, 1, 4], ids=["no slots", "few slots", "enough slots"])
def test_slots_and_tiers_do_not_change_a_bit(launch: MoeLaunch, staging: int | None) -> None:
    a = layer(routed(EDGES, 5), len(EDGES), 256)
    want = fused_moe(**a, launch=launch)
    spare, gap = 6, 40
    first, record = a["w13"][0].numel(), 3 * 256 * HIDDEN + gap
    order = torch.randperm(len(EDGES) + spare, generator=torch.Generator().manual_seed(1)).cuda()
    own, free = order[: len(EDGES)], order[len(EDGES) :]
    slab = torch.full((len(order), record), math.nan, dtype=torch.bfloat16, device="cuda")
    slab[own, :first], slab[own, first:-gap] = a["w13"].flatten(1), a["w2"].flatten(1)
    w13 = slab.as_strided((len(order), 512, HIDDEN), (record, HIDDEN, 1))
    w2 = slab.as_strided((len(order), HIDDEN, 256), (record, 256, 1), first)
    slots = None if staging is None else free[:staging].to(torch.int32)
    for mask in ([], range(0, 16, 3), range(16), [14]):
        host = torch.zeros(len(EDGES), dtype=torch.bool, device="cuda")
        host[list(mask)] = True
        got = fused_moe(
            **{**a, "w13": w13, "w2": w2},
            slot_table=own.to(torch.int32),
            host_experts=host,
            staging_slots=slots,
            launch=launch,
        )
        assert torch.equal(got, want)


@launches
def test_a_graph_follows_the_routing(launch: MoeLaunch) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    a = layer(skewed(900, 24, 4, 1.0, g), 24, 256)
    workspace, out = Workspace(torch.device("cuda")), torch.empty_like(a["hidden_states"])
    fused_moe(**a, workspace=workspace, out=out, launch=launch)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    fused_moe(**a, workspace=workspace, out=out, launch=launch)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_moe(**a, workspace=workspace, out=out, launch=launch)
    one, none = torch.full_like(a["topk_ids"], 7), torch.full_like(a["topk_ids"], -1)
    for ids in (skewed(900, 24, 4, 0.0, g), one, none, skewed(900, 24, 4, 3.0, g)):
        a["topk_ids"].copy_(ids)
        out.fill_(math.nan)
        graph.replay()
        graph.replay()
        if ids is none:
            assert not bool(out.any())
        else:
            assert_near(out, fused_moe(**a, launch=PLAIN))


@launches
def test_a_graph_follows_the_mask(launch: MoeLaunch) -> None:
    """Nothing to copy, few, many or more than there are slots: as many programs as are left do every item."""
    g = torch.Generator("cuda").manual_seed(0)
    experts, staging = 32, 6
    a = layer(skewed(4000, experts, 4, 0.5, g), experts, 256)
    want = fused_moe(**a, launch=launch)
    for name in ("w13", "w2"):
        a[name] = torch.cat([a[name], torch.full_like(a[name][:staging], math.nan)])
    host = torch.zeros(experts, dtype=torch.bool, device="cuda")
    slots = torch.arange(experts, experts + staging, dtype=torch.int32, device="cuda")
    a |= {"slot_table": torch.arange(experts, dtype=torch.int32, device="cuda"), "host_experts": host}
    a |= {"staging_slots": slots, "workspace": Workspace(torch.device("cuda")), "launch": launch}
    out = torch.empty_like(want)
    fused_moe(**a, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_moe(**a, out=out)
    for count in (0, 1, staging, experts, 0):
        host.fill_(False)
        host[torch.randperm(experts, generator=g, device="cuda")[:count]] = True
        a["w13"][experts:].fill_(math.nan)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, want)


@launches
@pytest.mark.parametrize(("experts", "intermediate"), [(64, 512), (512, 128)])
def test_many_random_routings(launch: MoeLaunch, experts: int, intermediate: int) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    tokens, top_k = 1500, 8
    a = layer(skewed(tokens, experts, top_k, 1.0, g), experts, intermediate)
    workspace, worst = Workspace(torch.device("cuda")), torch.zeros((), device="cuda")
    for i in range(200):
        a["topk_ids"] = skewed(tokens, experts, top_k, (0.0, 0.3, 1.0, 4.0)[i % 4], g)
        want = fused_moe(**a, launch=PLAIN).float()
        got = fused_moe(**a, launch=launch, workspace=workspace).float()
        error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
        worst = torch.maximum(worst, error.nan_to_num(math.inf))
    assert float(worst) < 0.5 * torch.finfo(torch.bfloat16).eps


@launches
def test_rows_beyond_the_32_bit_range(launch: MoeLaunch) -> None:
    ids = torch.randint(0, 8, (110_000, 10), dtype=torch.int32, device="cuda")
    assert ids.numel() * HIDDEN > 1 << 31
    a = layer(ids, 8, 128)
    assert_near(fused_moe(**a, launch=launch)[-5000:], fused_moe(**a, launch=PLAIN)[-5000:])


def test_rows_at_an_odd_stride_take_the_plain_kernels() -> None:
    a = layer(skewed(6000, 16, 4, 0.3, torch.Generator("cuda").manual_seed(0)), 16, 256)
    limits = device_limits(torch.device("cuda", 0))
    chosen = choose_launch(6000, HIDDEN, 256, 16, 4, torch.bfloat16, limits)
    assert isinstance(chosen.gate_up, SpecialisedLaunch)
    want = fused_moe(**a)
    wide = torch.zeros(6000, HIDDEN + 8, dtype=torch.bfloat16, device="cuda")
    wide[:, :HIDDEN] = a["hidden_states"]
    a["hidden_states"] = wide[:, :HIDDEN]
    assert_near(fused_moe(**a), want)
    with pytest.raises(ValueError, match=r"^hidden_states has "):
        fused_moe(**a, launch=TALL)
