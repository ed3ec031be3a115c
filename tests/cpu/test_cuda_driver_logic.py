"""The CUDA driver's own logic over simulated calls: what it undoes, waits for and refuses to start with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.driver_suite import BUDGET_PAGES, DriverSuite, back, create, pattern
from support.simulated_cuda import GRANULARITY as PAGE
from support.simulated_cuda import CUresult, SimulatedCuda, install

from vamp_runtime.errors import ConfigError, DriverError, StateLost
from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.driver import Tier

REFUSED = CUresult.CUDA_ERROR_UNKNOWN
VMM = "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
HOST_VMM = "CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    cuda = install(monkeypatch, SimulatedCuda())
    yield cuda
    usage = cuda.host.usage()
    assert (usage.reservations, usage.mappings, usage.handles) == (0, 0, 0)
    assert (cuda.depth, cuda.retained, cuda.events) == (0, 0, 0)
    cuda.host.close()


@pytest.fixture
def driver(cuda: SimulatedCuda) -> Iterator[CudaDriver]:
    driver = CudaDriver(0, 1, dict.fromkeys(Tier, BUDGET_PAGES * PAGE))
    yield driver
    driver.close()


class TestCudaDriverLogic(DriverSuite):
    pass


def test_set_access_that_fails_half_way_leaves_no_access(cuda: SimulatedCuda, driver: CudaDriver) -> None:
    address = driver.reserve(3 * PAGE)
    back(driver, address, create(driver, 1, Tier.HBM), PAGE)
    driver.write(address, pattern(1, PAGE))
    driver.map(address + PAGE, create(driver, 1, Tier.HBM))
    driver.map(address + 2 * PAGE, create(driver, 1, Tier.HOST))
    cuda.refusals["cuMemSetAccess"] = [None, REFUSED]
    with pytest.raises(DriverError, match="cuMemSetAccess: CUDA_ERROR_UNKNOWN"):
        driver.set_access(address, 3 * PAGE)
    assert driver.read(address, PAGE) == pattern(1, PAGE)
    for page in (1, 2):
        with pytest.raises(DriverError):
            driver.zero(address + page * PAGE, PAGE)
        with pytest.raises(DriverError):
            cuda.host.zero(address + page * PAGE, PAGE)
    driver.set_access(address, 3 * PAGE)
    driver.zero(address, 3 * PAGE)


@pytest.mark.parametrize("by_halves", [False, True])
@pytest.mark.parametrize("call", [1, 2])
def test_unmap_that_fails_half_way_is_undone(
    cuda: SimulatedCuda, driver: CudaDriver, call: int, by_halves: bool
) -> None:
    """Two pages of HBM and two of the host are two calls; either may have taken a page before it failed."""
    address = driver.reserve(4 * PAGE)
    back(driver, address, create(driver), PAGE)
    driver.map(address + PAGE, create(driver))
    back(driver, address + 2 * PAGE, create(driver, 1, Tier.HOST), PAGE)
    back(driver, address + 3 * PAGE, create(driver, 1, Tier.HOST), PAGE)
    driver.write(address, pattern(2, PAGE))
    driver.write(address + 2 * PAGE, pattern(3, 2 * PAGE))
    before = driver.usage()
    cuda.by_halves = by_halves
    cuda.refusals["cuMemUnmap"] = [*[None] * (call - 1), REFUSED]
    with pytest.raises(DriverError, match="cuMemUnmap"):
        driver.unmap(address, 4 * PAGE)
    assert driver.usage() == before == cuda.host.usage()
    assert driver.read(address, PAGE) == pattern(2, PAGE)
    assert driver.read(address + 2 * PAGE, 2 * PAGE) == pattern(3, 2 * PAGE)
    with pytest.raises(DriverError):
        cuda.host.read(address + PAGE, 1)


def test_a_mapping_that_cannot_be_unmapped_at_all_is_said(cuda: SimulatedCuda, driver: CudaDriver) -> None:
    address = driver.reserve(2 * PAGE)
    driver.map(address, create(driver), create(driver))
    cuda.refusals["cuMemUnmap"] = [REFUSED, REFUSED]
    with pytest.raises(StateLost, match=r"cuMemUnmap.*undoing it failed: cuMemMap"):
        driver.unmap(address, 2 * PAGE)
    handles = sorted(cuda.host._space.handles)[-2:]
    cuda.host.map(address + PAGE, handles[1])  # so that closing finds what it must


def test_neighbours_of_one_tier_take_one_call(cuda: SimulatedCuda, driver: CudaDriver) -> None:
    address = driver.reserve(6 * PAGE)
    tiers = [Tier.HBM] * 3 + [Tier.HOST] * 2 + [Tier.PEER]
    handles = [create(driver, 1, tier) for tier in tiers]
    cuda.log.clear()
    driver.map(address, *handles)
    driver.set_access(address, 6 * PAGE)
    driver.unmap(address, 6 * PAGE)
    context = ["cuCtxPushCurrent", "cuCtxPopCurrent"]
    assert [name for name in cuda.log if name not in context] == (
        ["cuMemMap"] * 6 + ["cuMemSetAccess"] * 3 + ["cuMemUnmap"] * 3
    )
    assert cuda.log.count("cuCtxPushCurrent") == 3, "once for each call of the driver"


def test_a_map_of_several_that_fails_half_way_maps_none(cuda: SimulatedCuda, driver: CudaDriver) -> None:
    address, before = driver.reserve(3 * PAGE), driver.usage()
    handles = [create(driver) for _ in range(3)]
    cuda.refusals["cuMemMap"] = [None, None, REFUSED]
    with pytest.raises(DriverError, match="cuMemMap"):
        driver.map(address, *handles)
    assert driver.usage().mappings == cuda.host.usage().mappings == before.mappings
    cuda.refusals = {"cuMemMap": [None, REFUSED], "cuMemUnmap": [REFUSED]}
    with pytest.raises(StateLost, match=r"cuMemMap.*undoing it failed: cuMemUnmap"):
        driver.map(address, *handles)
    cuda.host.unmap(address, PAGE)


def test_a_context_that_stays_on_the_thread_is_said(cuda: SimulatedCuda, driver: CudaDriver) -> None:
    address, handle = driver.reserve(PAGE), create(driver)
    cuda.refusals["cuCtxPopCurrent"] = [REFUSED]
    with pytest.raises(StateLost, match="context"):
        driver.map(address, handle)
    cuda.depth -= 1


@pytest.mark.parametrize("undo", ["cuMemMap", "cuMemSetAccess"])
def test_what_cannot_be_undone_is_said(cuda: SimulatedCuda, driver: CudaDriver, undo: str) -> None:
    address = driver.reserve(2 * PAGE)
    back(driver, address, create(driver), PAGE)
    back(driver, address + PAGE, create(driver), PAGE)
    cuda.refusals = {"cuMemUnmap": [REFUSED], undo: [REFUSED]}
    with pytest.raises(StateLost, match=rf"cuMemUnmap.*undoing it failed: {undo}"):
        driver.unmap(address, 2 * PAGE)
    handles = sorted(cuda.host._space.handles)[-2:]
    missing = [0, 1] if undo == "cuMemMap" else [1]
    for page in missing:
        cuda.host.map(address + page * PAGE, handles[page])  # so that closing finds what it must


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemCreate", "cuMemRelease", "cuMemAddressFree"])
def test_a_single_call_that_fails_changes_nothing(cuda: SimulatedCuda, driver: CudaDriver, call: str) -> None:
    address, handle = driver.reserve(PAGE), create(driver)
    before = driver.usage()
    cuda.refusals[call] = [REFUSED]
    attempts = {
        "cuMemMap": lambda: driver.map(address, handle),
        "cuMemCreate": lambda: driver.create(PAGE, Tier.HBM),
        "cuMemRelease": lambda: driver.release(handle),
        "cuMemAddressFree": lambda: driver.free(address, PAGE),
    }
    with pytest.raises(DriverError, match=f"{call}: CUDA_ERROR_UNKNOWN"):
        attempts[call]()
    assert driver.usage() == before
    attempts[call]()


def test_out_of_memory_is_a_result(cuda: SimulatedCuda, driver: CudaDriver) -> None:
    cuda.refusals["cuMemCreate"] = [CUresult.CUDA_ERROR_OUT_OF_MEMORY]
    assert driver.create(PAGE, Tier.HBM) is None
    assert driver.create(BUDGET_PAGES * PAGE, Tier.HBM) is not None


def test_unmap_waits_only_for_what_the_stream_uses(cuda: SimulatedCuda, driver: CudaDriver) -> None:
    address = driver.reserve(3 * PAGE)
    for page in range(3):
        back(driver, address + page * PAGE, create(driver), PAGE)
    driver.copy(address, address + PAGE, PAGE)
    cuda.log.clear()
    driver.unmap(address + 2 * PAGE, PAGE)
    assert "cuStreamSynchronize" not in cuda.log
    driver.unmap(address + PAGE, PAGE)
    assert [name for name in cuda.log if name in ("cuStreamSynchronize", "cuMemUnmap")] == [
        "cuMemUnmap",
        "cuStreamSynchronize",
        "cuMemUnmap",
    ]
    cuda.log.clear()
    driver.unmap(address, PAGE)
    assert "cuStreamSynchronize" not in cuda.log


def test_a_mark_that_has_not_passed(cuda: SimulatedCuda, driver: CudaDriver) -> None:
    cuda.ready = False
    mark = driver.mark()
    assert not driver.passed(mark)
    driver.wait(mark)
    assert driver.passed(mark)
    for _ in range(10):
        driver.wait(driver.mark())
    assert cuda.events == 1
    driver.mark()


@pytest.mark.parametrize("missing", [VMM, HOST_VMM])
def test_a_missing_attribute_is_named(cuda: SimulatedCuda, missing: str) -> None:
    cuda.zeros.add(missing)
    with pytest.raises(ConfigError, match=f"device=0: {missing} is 0; use"):
        CudaDriver(0)
    if missing == HOST_VMM:
        CudaDriver(0, budgets={Tier.HBM: PAGE}).close()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_failed_trial_names_the_tier_and_leaves_nothing(cuda: SimulatedCuda, call: str) -> None:
    cuda.refusals[call] = [REFUSED]
    with pytest.raises(ConfigError, match=f"tier hbm on device=0 failed a trial move .{call}"):
        CudaDriver(0, budgets={Tier.HBM: PAGE})


def test_a_tier_without_room_is_named(cuda: SimulatedCuda) -> None:
    cuda.refusals["cuMemCreate"] = [CUresult.CUDA_ERROR_OUT_OF_MEMORY]
    with pytest.raises(ConfigError, match="tier host has no room"):
        CudaDriver(0, budgets={Tier.HOST: PAGE})


def test_devices_that_cannot_serve_are_named(cuda: SimulatedCuda) -> None:
    for arguments, message in (((7,), "device=7"), ((0, 0), "peer=0"), ((0, 9), "peer=9")):
        with pytest.raises(ConfigError, match=message):
            CudaDriver(*arguments)


def test_calls_past_the_bindings_are_checked_too(cuda: SimulatedCuda) -> None:
    driver, asked = CudaDriver(0), []

    def refuse(*arguments: int) -> int:
        asked.append(arguments)
        return CUresult.CUDA_ERROR_INVALID_VALUE.value

    address, handle = driver.reserve(PAGE), driver.create(PAGE, Tier.HBM)
    assert handle is not None
    driver._api._short = {"cuMemMap": refuse}
    with pytest.raises(DriverError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        driver.map(address, handle)
    assert len(asked) == 1 and asked[0][:3] == (address, PAGE, 0) and all(type(a) is int for a in asked[0])
    driver._api._short = {"cuMemMap": lambda *arguments: 0}
    driver.map(address, handle)
    assert driver.usage().mappings == 1
    driver._api._short = {}
    cuda.host.map(address, handle)  # what the call would have done
    driver.close()


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match="needs cuda-bindings"):
        CudaDriver(0)


def test_a_bound_thread_pushes_no_context(cuda: SimulatedCuda, driver: CudaDriver) -> None:
    def back_a_page() -> None:
        driver.bind_thread()
        pushed = cuda.log.count("cuCtxPushCurrent")
        back(driver, driver.reserve(PAGE), create(driver, 1, Tier.HBM), PAGE)
        assert cuda.log.count("cuCtxPushCurrent") == pushed and "cuMemSetAccess" in cuda.log

    with ThreadPoolExecutor(1) as pool:
        pool.submit(back_a_page).result()
    driver.reserve(PAGE)
    assert cuda.log[-3:] == ["cuCtxPushCurrent", "cuMemAddressReserve", "cuCtxPopCurrent"]
