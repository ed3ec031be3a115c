"""What is copied ahead of layers is counted as it is queued, and is part of what offloading costs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.rigs import Rig, Shape, build_rig

from vamp_integration import metrics
from vamp_integration.commands import MemoryFigures
from vamp_integration.host_reads import HostReads, StagedAhead
from vamp_integration.journal import Journal
from vamp_integration.staging import Staging
from vamp_runtime.controller import CapacityController
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.policy.staging import StagingCosts

CPU = torch.device("cpu")
# Three of eight experts fit into a buffer.
TIGHT = Shape("tight", layers=3, experts=8, halves=(2,), ratio=1.0, positions=1, staging=6)
LARGE = 64  # tokens of a step that ``auto`` stages ahead


@pytest.fixture
def rig() -> Iterator[Rig]:
    driver = HostDriver(4096)
    yield build_rig(driver, TIGHT)
    driver.close()


def staging_of(rig: Rig, mode: str) -> Staging:
    """Costs by which ``auto`` stages ahead what has some tokens to hide the copies behind."""
    costs = StagingCosts(
        experts=rig.geometry.experts,
        top_k=2,
        expert_bytes=rig.geometry.expert_bytes,
        weight_bytes=2,
        hbm_rate=1e15,
        read_rate=rig.geometry.expert_bytes / 0.012,
        copy_rate=rig.geometry.expert_bytes / 0.01,
        compute_rate=1e18,
        token_s=1e-3,
    )
    return Staging(rig.slab, rig.driver, CPU, mode, costs, 1024)


def take_a_step(staging: Staging, layers: int, tokens: int) -> None:
    for layer in range(layers):
        if staging.wanted(tokens):
            with staging.ahead(layer, tokens):
                pass


@pytest.mark.parametrize(
    ("mode", "level", "copied", "left"), [("region", 2, 2, []), ("region", 5, 3, [2] * 3), ("auto", 3, 3, [])]
)
def test_every_copied_byte_counts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, mode: str, level: int, copied: int, left: list[int]
) -> None:
    staging, layers = staging_of(rig, mode), rig.geometry.layers
    rig.moved(rig.boundary.offload(level))
    staging.update()
    sizes, copy = [], rig.driver.copy

    def note(target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        sizes.append(nbytes)
        copy(target, source, nbytes, stream)

    monkeypatch.setattr(rig.driver, "copy", note)
    for _ in range(4):
        take_a_step(staging, layers, LARGE)
    assert staging.nbytes == sum(sizes) == 4 * layers * copied * rig.geometry.expert_bytes
    assert (staging.so_far().steps, staging.so_far().hits) == (4, 4 * LARGE * 2)
    assert [len(experts) for experts in staging.so_far().left] == left


def test_steps_that_read_in_place_copy_nothing(rig: Rig) -> None:
    staging = staging_of(rig, "auto")
    take_a_step(staging, rig.geometry.layers, LARGE)  # everything is in HBM
    rig.moved(rig.boundary.offload(3))
    staging.update()
    take_a_step(staging, rig.geometry.layers, 1)
    assert staging.nbytes == 0 and staging.so_far() == StagedAhead()


def test_no_byte_counts_twice(rig: Rig) -> None:
    """With all that is out staged in every step nothing is read in place, and with none all of it is."""
    for mode, in_place in (("region", False), ("off", True)):
        staging = staging_of(rig, mode)
        if rig.slab.level == 0:
            rig.moved(rig.boundary.offload(2))
        staging.update()
        reads = HostReads(rig.geometry.expert_bytes, staging.so_far)
        hosted = [[e for g in rig.slab.out(la) for e in rig.slab.experts_of(la, g)] for la in range(3)]
        for hits in (None, [[20] * 8] * 3):
            for _ in range(10):
                take_a_step(staging, 3, 8)
            reads.look(hits, 10, hosted)
        assert bool(reads.nbytes) is in_place and bool(staging.nbytes) is not in_place


def test_offloading_costs_what_is_read_and_what_is_staged() -> None:
    journal = Journal()
    journal.memory = MemoryFigures(host_bytes_read=3000, staged_bytes=8000)
    arbiter: Any = SimpleNamespace(
        controller=CapacityController(10),
        pool=SimpleNamespace(cordon_limit=None, evictions=0),
        journal=journal,
        costs=SimpleNamespace(parameters=SimpleNamespace(t_prefill_s=1.0)),
        host_kv=None,
    )
    values = metrics.values(arbiter, metrics.LinkRates(read=1000.0, copy=2000.0))
    assert values["vamp:staged_bytes"] == 8000 and values["vamp:moe_host_read_bytes"] == 3000
    assert values["vamp:realized_cost_seconds/offload"] == 7_000_000
