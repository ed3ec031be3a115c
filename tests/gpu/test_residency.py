"""The fused layer over one reservation whose records lie in HBM, in a peer and in host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.tensor import tensor_at

pytest.importorskip("triton")
from vamp_kernels.fused_moe import fused_moe
from vamp_kernels.gather import gather
from vamp_kernels.workspace import Workspace

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
EXPERTS, STAGING, TOP_K, HIDDEN, INTERMEDIATE = 24, 8, 4, 2048, 512
FIRST, RECORD = 2 * INTERMEDIATE * HIDDEN, 4 * INTERMEDIATE * HIDDEN  # elements of w13, and between slots


@dataclass
class Layer:
    """Experts at slots 0..23, staging slots behind them, then an alias for every expert out of HBM.

    ``w13`` and ``w2`` are views over the reservation, ``plain`` the same experts in memory of torch. Of fp8,
    ``scales`` are the arguments for its scales.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    plain: tuple[torch.Tensor, torch.Tensor]
    host: torch.Tensor
    own: torch.Tensor
    aliases: torch.Tensor
    staging: torch.Tensor
    scales: dict[str, torch.Tensor]

    def poison_staging(self) -> None:
        for slot in self.staging.tolist():
            self.w13[slot].fill_(math.nan)
            self.w2[slot].fill_(math.nan)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def layer(request: pytest.FixtureRequest) -> Iterator[Layer]:
    joined = torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1)
    driver = CudaDriver(0, 1 if joined else None)
    yield build(driver, request.param)
    torch.cuda.synchronize()
    driver.close()


def build(driver: CudaDriver, dtype: torch.dtype) -> Layer:
    order = [tier for tier in (Tier.HBM, Tier.HOST, Tier.PEER) if tier in driver.tiers]
    tiers = [order[expert % len(order)] for expert in range(EXPERTS)]
    out = [expert for expert, tier in enumerate(tiers) if tier is not Tier.HBM]
    slots, nbytes = EXPERTS + STAGING + len(out), dtype.itemsize * RECORD
    base = driver.reserve(slots * nbytes)
    handles = [driver.create(nbytes, tier) for tier in tiers + [Tier.HBM] * STAGING]
    for slot, handle in enumerate([*handles, *(handles[expert] for expert in out)]):
        assert handle is not None
        driver.map(base + slot * nbytes, handle)
    driver.set_access(base, slots * nbytes)

    def view(rows: int, columns: int, first: int) -> torch.Tensor:
        strides = (RECORD, columns, 1)
        return tensor_at(base + dtype.itemsize * first, (slots, rows, columns), dtype, CUDA, strides)

    w13, w2 = view(2 * INTERMEDIATE, HIDDEN, 0), view(HIDDEN, INTERMEDIATE, FIRST)
    for expert in range(EXPERTS):
        for weight in (w13[expert], w2[expert]):
            weight.copy_(torch.randn(weight.shape, device=CUDA) * weight.shape[1] ** -0.5)
    scales = {}
    if dtype == torch.float8_e4m3fn:
        for name, weight in (("w13_scale", w13), ("w2_scale", w2)):
            shape = (EXPERTS, weight.shape[1] // 128, weight.shape[2] // 128)
            scales[name] = torch.rand(shape, device=CUDA) + 0.5
    own = torch.arange(EXPERTS, dtype=torch.int32, device=CUDA)
    aliases = own.clone()
    aliases[out] = torch.arange(EXPERTS + STAGING, slots, dtype=torch.int32, device=CUDA)
    return Layer(
        w13,
        w2,
        (w13[:EXPERTS].clone(), w2[:EXPERTS].clone()),
        torch.tensor([tier is Tier.HOST for tier in tiers], device=CUDA),
        own,
        aliases,
        torch.arange(EXPERTS, EXPERTS + STAGING, dtype=torch.int32, device=CUDA),
        scales,
    )


def step(tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Tokens, and a skewed routing of them with one id of padding."""
    g = torch.Generator(CUDA).manual_seed(seed)
    score = torch.rand(tokens, EXPERTS, generator=g, device=CUDA)
    score += 0.4 * torch.randn(EXPERTS, generator=g, device=CUDA)
    ids = score.topk(TOP_K, dim=1).indices.to(torch.int32)
    ids[0, 0] = -1
    return {
        "hidden_states": torch.randn(tokens, HIDDEN, generator=g, device=CUDA).bfloat16(),
        "topk_weights": torch.rand(tokens, TOP_K, generator=g, device=CUDA),
        "topk_ids": ids,
    }


def plain(layer: Layer, a: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer in HBM, without slots and masks."""
    return fused_moe(**a, w13=layer.plain[0], w2=layer.plain[1], **layer.scales)


@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 60, 300, 2000, 8192])
@pytest.mark.parametrize("staging", [None, 1, STAGING], ids=["no slots", "few slots", "enough slots"])
@pytest.mark.parametrize("at", ["own", "aliases"])
def test_where_an_expert_lies_does_not_change_a_bit(
    layer: Layer, tokens: int, staging: int | None, at: str
) -> None:
    a = step(tokens, seed=tokens)
    slots = None if staging is None else layer.staging[:staging]
    workspace = Workspace(CUDA)
    for _ in range(2):
        layer.poison_staging()
        got = fused_moe(
            **a,
            w13=layer.w13,
            w2=layer.w2,
            slot_table=getattr(layer, at),
            host_experts=layer.host,
            staging_slots=slots,
            workspace=workspace,
            **layer.scales,
        )
        assert torch.equal(got, plain(layer, a))


@pytest.mark.parametrize("tokens", [4, 16, 60, 2000])
def test_a_graph_follows_masks_and_slots(layer: Layer, tokens: int) -> None:
    a, workspace = step(tokens, seed=0), Workspace(CUDA)
    table, host, out = layer.own.clone(), layer.host.clone(), torch.empty_like(a["hidden_states"])

    def call() -> None:
        fused_moe(
            **a,
            w13=layer.w13,
            w2=layer.w2,
            slot_table=table,
            out=out,
            host_experts=host,
            staging_slots=layer.staging,
            workspace=workspace,
            **layer.scales,
        )

    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    masks = [layer.host, torch.zeros_like(host), torch.ones_like(host), layer.host]
    for seed, mask in enumerate(masks):
        for name, tensor in step(tokens, seed).items():
            a[name].copy_(tensor)
        host.copy_(mask)
        table.copy_(layer.aliases if seed % 2 else layer.own)
        layer.poison_staging()
        out.fill_(math.nan)
        for _ in range(3):
            graph.replay()
        assert torch.equal(out, plain(layer, a))


def test_a_graph_gathers_what_the_list_names(layer: Layer) -> None:
    copies = torch.zeros(2, STAGING, dtype=torch.int32, device=CUDA)
    count = torch.zeros(1, dtype=torch.int32, device=CUDA)
    gather(layer.w13, copies, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather(layer.w13, copies, count)
        gather(layer.w2, copies, count)
    hosted = layer.host.nonzero().flatten().to(torch.int32)
    for first, chosen in ((0, 0), (0, 3), (2, STAGING - 3)):
        layer.poison_staging()
        copies[0, :chosen] = hosted[first : first + chosen]
        copies[1, :chosen] = layer.staging[:chosen]
        count.fill_(chosen)
        graph.replay()
        sources, targets = copies[:, :chosen].long()
        assert torch.equal(layer.w13[targets].float(), layer.plain[0][sources].float())
        assert torch.equal(layer.w2[targets].float(), layer.plain[1][sources].float())
        assert bool(layer.w13[layer.staging[chosen:].long()].float().isnan().all())
