from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.boundary_suite import OFFLOAD, RESTORE, SWAP, BoundarySuite, FaultSuite, move, swaps
from support.hashed_moves import move_and_compare
from support.rigs import RECORDS, SHAPES, Rig, Shape, build_rig

from vamp_kernels.gather import gather
from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.tensor import tensor_at

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    driver = CudaDriver(0)
    yield driver
    torch.cuda.synchronize()
    driver.close()


class TestCudaBoundary(BoundarySuite):
    cycles = 100


class TestCudaFaults(FaultSuite):
    step = 7


def own_records(rig: Rig, layer: int) -> torch.Tensor:
    """``[experts, bytes]`` at the experts' own addresses, whatever lies behind them."""
    shape = (rig.geometry.experts, rig.geometry.expert_bytes)
    return tensor_at(rig.slab.address(layer, 0), shape, torch.uint8, CUDA)


def test_kernels_read_the_same_experts_at_every_level(driver: CudaDriver) -> None:
    rig = build_rig(driver, RECORDS)
    loaded = [own_records(rig, layer).clone() for layer in range(RECORDS.layers)]
    for walk in (
        lambda: rig.boundary.offload(2),
        lambda: rig.boundary.swap(swaps(rig.boundary)),
        lambda: rig.boundary.offload(1),
        lambda: rig.boundary.restore(3),
    ):
        assert walk().ok
        for layer, expected in enumerate(loaded):
            assert torch.equal(own_records(rig, layer), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_thousand_moves_leave_every_expert(driver: CudaDriver, shape: Shape) -> None:
    rig = build_rig(driver, shape)
    move_and_compare(rig, CUDA, moves=1000)
    assert driver.usage().tier_bytes[Tier.HOST] == rig.geometry.host_home_bytes


def test_a_move_waits_for_kernels_queued_before_its_redirect(driver: CudaDriver) -> None:
    """A kernel still to run reads HBM pages that are about to leave: it must see experts, not KV zeros."""
    rig = build_rig(driver, RECORDS)
    loaded = own_records(rig, 0).clone()
    for kind in (OFFLOAD, SWAP, RESTORE):
        torch.cuda._sleep(500_000_000)
        read = own_records(rig, 0).clone()
        rig.boundary.request(move(rig.boundary, kind, 1))
        rig.boundary.redirect()
        mark = driver.mark()
        assert not driver.passed(mark), "the kernels were too quick to show anything"
        assert rig.boundary.prepare() and rig.boundary.agree()
        rig.moved(rig.boundary.publish())
        assert torch.equal(read, loaded)


def test_device_memory_stays_the_same(driver: CudaDriver) -> None:
    rig = build_rig(driver, RECORDS)
    rig.moved(rig.boundary.offload(1))
    rig.moved(rig.boundary.restore(1))
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(CUDA)[0]
    for _ in range(100):
        assert rig.boundary.offload(3).ok and rig.boundary.restore(3).ok
    assert before - torch.cuda.mem_get_info(CUDA)[0] <= 8 << 20


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_kernel_is_launched_at_the_highest_level(driver: CudaDriver, shape: Shape) -> None:
    """Triton's launcher asks the driver about the address of every tensor that it is given."""
    rig = build_rig(driver, shape)
    for layer in range(shape.layers):
        rig.slab.set_coldness(layer, range(rig.geometry.groups))
    rig.slab.refresh_homes(1 << 40)
    assert rig.boundary.offload(rig.geometry.max_level).ok
    none = torch.zeros((2, 1), dtype=torch.int32, device=CUDA), torch.zeros(1, dtype=torch.int32, device=CUDA)
    for part, size in enumerate(rig.geometry.part_bytes):
        shape_of = (rig.geometry.experts, size // 2)
        gather(tensor_at(rig.slab.address(0, part), shape_of, torch.bfloat16, CUDA), *none)
    torch.cuda.synchronize()
