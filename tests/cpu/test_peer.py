"""The peer tier's settings and the search for a GPU that can hold it, on a simulated pair of GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.qwen3_next import CONFIG
from support.rigs import Shape, build_rig
from support.simulated_cuda import GRANULARITY, CUresult, SimulatedCuda, install

from vamp_integration import home_room, plan
from vamp_integration.memory_driver import open_driver
from vamp_integration.peer_room import check_visible, peer_for, shortage
from vamp_integration.settings import VampSettings
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory import peer as module
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.host_memory import CgroupLimit, HostMemory
from vamp_runtime.memory.move import Swap
from vamp_runtime.memory.peer import Peer, choose_peer, find_peers

GIB = 1 << 30


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    simulated = install(monkeypatch, SimulatedCuda())
    monkeypatch.setattr(module, "STEP_BYTES", GRANULARITY)
    yield simulated
    assert simulated.host.usage().handles == 0 and simulated.retained == 0, "a trial was not given back"
    simulated.host.close()


@pytest.mark.parametrize("granules", [0, 1, 16])
def test_a_peer_with_room_is_found(cuda: SimulatedCuda, granules: int) -> None:
    assert find_peers(0, granules * GRANULARITY) == (Peer(1, granules * GRANULARITY),)
    assert find_peers(0, max(granules * GRANULARITY - 1, 0)) == (Peer(1, max(granules * GRANULARITY - 1, 0)),)


def test_the_room_there_is_is_found_where_it_is_not_enough(cuda: SimulatedCuda) -> None:
    assert find_peers(0, 40 * GRANULARITY) == (Peer(1, 16 * GRANULARITY),)
    cuda.refusals["cuMemCreate"] = [CUresult.CUDA_ERROR_OUT_OF_MEMORY] * 9
    assert find_peers(0, 40 * GRANULARITY) == (Peer(1, 0),)


def test_gpus_out_of_reach_are_none(cuda: SimulatedCuda) -> None:
    cuda.joined = False
    assert find_peers(0, GRANULARITY) == ()
    cuda.joined, cuda.gpus = True, 1
    assert find_peers(0, GRANULARITY) == ()


def test_a_peer_that_fails_the_trial_is_one_line(cuda: SimulatedCuda) -> None:
    cuda.refusals["cuMemCreate"] = [CUresult.CUDA_ERROR_UNKNOWN]
    with pytest.raises(ConfigError, match=r"^peer_hbm_gib: GPU 1 failed a trial .*\(.*UNKNOWN\); use 0$"):
        find_peers(0, GRANULARITY)


def test_the_first_with_room_is_chosen_else_that_with_the_most() -> None:
    peers = (Peer(1, 3), Peer(2, 9), Peer(5, 9), Peer(6, 4))
    assert choose_peer(peers, 9) == Peer(2, 9) and choose_peer(peers[::3], 9) == Peer(6, 4)
    assert choose_peer(peers, 3) == Peer(1, 3) and choose_peer((), 3) is None


def geometry(settings: VampSettings) -> SlabGeometry:
    return plan.slab_geometry(settings, 24, 512, (6 << 20,), "cuda")


def test_an_engine_moves_pages_over_homes_on_both_sides(
    cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own driver on two simulated GPUs: the peer is found, and holds what the plan says."""
    shape = Shape("small", 1, 6, (2,), 0.5, positions=1, pages=2, peer_homes=1)
    settings = VampSettings(granule_kib=GRANULARITY >> 10, peer_hbm_gib=GRANULARITY / GIB)
    geometry = plan.slab_geometry(replace(settings, max_offload_ratio=0.5), 1, 6, (GRANULARITY,), "cuda")
    assert geometry.peer_homes == 1 and geometry.home_slots == 3
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    driver = open_driver(settings, geometry, torch.device("cuda", 0))
    assert driver.tiers == {Tier.HBM, Tier.HOST, Tier.PEER}
    rig = build_rig(driver, shape)
    assert driver.usage().tier_bytes[Tier.PEER] == geometry.peer_home_bytes
    rig.moved(rig.boundary.offload(3))
    rig.moved(rig.boundary.restore(2))
    rig.moved(rig.boundary.swap([Swap(0, rig.slab.ready(0, 2)[1], rig.slab.out(0)[0])]))
    assert rig.slab.out(0) == (3,) and not rig.slab.hosted(0)
    driver.close()


def test_a_machine_with_one_gpu_is_refused_before_a_page_is_taken(cuda: SimulatedCuda) -> None:
    cuda.gpus = 1
    settings = VampSettings(granule_kib=GRANULARITY >> 10, peer_hbm_gib=GRANULARITY / GIB)
    geometry = plan.slab_geometry(settings, 1, 6, (GRANULARITY,), "cuda")
    with pytest.raises(ConfigError, match=r"^peer_hbm_gib: \S+ needs another GPU, and none is visible"):
        open_driver(settings, geometry, torch.device("cuda", 0))


def test_without_peer_homes_no_gpu_is_looked_for() -> None:
    def find(device: int, nbytes: int) -> tuple[Peer, ...]:
        pytest.fail("looked for a peer")

    assert peer_for(VampSettings(), geometry(VampSettings()), 0, find) is None
    nothing = VampSettings(max_offload_ratio=0.0, peer_hbm_gib=4)
    assert peer_for(nothing, geometry(nothing), 0, find) is None


def test_the_gpu_found_holds_what_the_homes_take() -> None:
    settings, asked = VampSettings(max_offload_ratio=0.1, peer_hbm_gib=3), []

    def find(device: int, nbytes: int) -> tuple[Peer, ...]:
        asked.append((device, nbytes))
        return (Peer(1, 0), Peer(3, nbytes))

    assert peer_for(settings, geometry(settings), 2, find) == 3
    assert asked == [(2, 21 * 24 * (6 << 20))]


@pytest.mark.parametrize("room", [0.0, 0.1, 1.5, 2.9])
def test_too_little_room_names_what_would_work(room: float) -> None:
    settings = VampSettings(max_offload_ratio=0.1, peer_hbm_gib=3)
    peers = (Peer(1, int(room * GIB)),)
    with pytest.raises(ConfigError) as caught:
        peer_for(settings, geometry(settings), 0, lambda device, nbytes: peers)
    found = re.fullmatch(
        r"peer_hbm_gib: 3 needs 2\.95 GiB .* GPU 1 has (.+) GiB left; use (\S+), or .*", str(caught.value)
    )
    assert found is not None
    works = replace(settings, peer_hbm_gib=float(found[2]))
    assert (works.peer_hbm_gib > 0) is (room > 1)
    peer_for(works, geometry(works), 0, lambda device, nbytes: peers)


def test_no_peer_in_reach_is_one_line() -> None:
    assert shortage(4, (), GIB, 0) == (
        "peer_hbm_gib: 4 needs another GPU, and none is visible and in reach; use 0"
    )
    assert shortage(1, (Peer(1, GIB),), GIB, 0) == ""


def test_one_visible_gpu_is_refused_before_anything_starts() -> None:
    settings = VampSettings(peer_hbm_gib=4)
    with pytest.raises(ConfigError, match=r"^peer_hbm_gib: 4 needs another GPU, and none is visible"):
        check_visible(settings, geometry(settings), 1)
    check_visible(settings, geometry(settings), 2)
    check_visible(VampSettings(), geometry(VampSettings()), 1)


def test_a_peer_too_small_for_every_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^peer_hbm_gib: 0.1 holds no expert group of each of 24 layers;"):
        geometry(VampSettings(peer_hbm_gib=0.1))
    assert geometry(VampSettings(peer_hbm_gib=0.15)).peer_homes == 1, "what the message names"


@pytest.mark.parametrize(
    ("ranks", "device", "says"), [(1, "cpu", "a GPU; use 0"), (2, "cuda", "no rank is on")]
)
def test_engines_that_cannot_use_a_peer_are_refused(ranks: int, device: str, says: str) -> None:
    settings = VampSettings(peer_hbm_gib=4)
    with pytest.raises(ConfigError, match=f"^peer_hbm_gib: 4 needs .*{says}"):
        plan.check_plan(settings, CONFIG, ranks, None, device)
    assert plan.check_plan(VampSettings(), CONFIG, ranks, None, device) is not None


def test_a_plan_with_a_peer_has_homes_in_both() -> None:
    found = plan.check_plan(VampSettings(max_offload_ratio=0.1, peer_hbm_gib=3), CONFIG, 1, None, "cuda")
    assert found is not None and (found.peer_homes, found.host_homes, found.max_level) == (21, 30, 51)


@pytest.mark.parametrize(("gib", "staged"), [(0, 51), (3, 30), (6, 9), (100, 0)])
def test_peer_homes_are_not_staged(gib: float, staged: int) -> None:
    for mode in ("auto", "region"):
        settings = VampSettings(max_offload_ratio=0.1, peer_hbm_gib=gib, staging=mode, staging_mib=1024)
        assert geometry(settings).staging_records == 2 * staged


def test_peer_homes_take_no_host_memory() -> None:
    ratio = VampSettings(max_offload_ratio=0.25)
    tight = HostMemory(64 * GIB, 64 * GIB, CgroupLimit("/memory.max", 16 * GIB, 2 * GIB))
    with pytest.raises(ConfigError, match=r"max_offload_ratio: 0\.25 needs 18\.00 GiB of host memory"):
        home_room.check_homes(ratio, geometry(ratio), 1, tight)
    both = replace(ratio, peer_hbm_gib=4.5)
    assert geometry(both).host_home_bytes == 18 * GIB - geometry(both).peer_home_bytes
    home_room.check_homes(both, geometry(both), 1, tight)
    assert home_room.fitting_ratio(geometry(both), 14 * GIB) >= 0.25
    assert home_room.fitting_ratio(geometry(both), 0) == 0.06
