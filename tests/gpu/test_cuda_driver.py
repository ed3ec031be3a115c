from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from support.driver_suite import BUDGET_PAGES, DriverSuite, back, create, pattern

from vamp_runtime.errors import ConfigError, DriverError
from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.tensor import tensor_at

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
BIG = 256 << 20


@pytest.fixture(scope="module")
def peer() -> int | None:
    joined = torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1)
    return 1 if joined else None


@pytest.fixture(scope="module")
def granularity(peer: int | None) -> int:
    driver = CudaDriver(0, peer)
    driver.close()
    return driver.granularity


@pytest.fixture
def driver(peer: int | None, granularity: int) -> Iterator[CudaDriver]:
    tiers = [tier for tier in Tier if tier is not Tier.PEER or peer is not None]
    driver = CudaDriver(0, peer, dict.fromkeys(tiers, BUDGET_PAGES * granularity))
    yield driver
    torch.cuda.synchronize()
    driver.close()


@pytest.fixture
def roomy() -> Iterator[CudaDriver]:
    driver = CudaDriver(0)
    yield driver
    torch.cuda.synchronize()
    driver.close()


class TestCudaDriver(DriverSuite):
    def test_kernels_read_and_write_the_page_behind_the_address(self, driver: CudaDriver, tier: Tier) -> None:
        page = driver.granularity
        address = driver.reserve(page)
        handles = [create(driver, 1, Tier.HBM), create(driver, 1, tier)]
        tensor = tensor_at(address, (page // 4,), torch.int32, CUDA)
        for value, handle in enumerate(handles):
            back(driver, address, handle, page)
            tensor.fill_(value + 1)
            torch.cuda.synchronize()
            driver.unmap(address, page)
        for value, handle in ((0, handles[0]), (1, handles[1]), (0, handles[0])):
            back(driver, address, handle, page)
            assert bool((tensor == value + 1).all())
            assert driver.read(address, 4) == bytes([value + 1, 0, 0, 0])
            torch.cuda.synchronize()
            driver.unmap(address, page)

    def test_neighbours_are_opened_and_unmapped_in_one_call(self, driver: CudaDriver, tier: Tier) -> None:
        """``cuMemSetAccess`` and ``cuMemUnmap`` over several whole mappings do what a call for each would."""
        page, log = driver.granularity, []
        address = driver.reserve(6 * page)
        handles = [create(driver, 1, tier) for _ in range(6)]
        plain = driver._api.plain

        def logged(name: str, *args: object) -> object:
            log.append(name)
            return plain(name, *args)

        driver._api.plain = logged  # type: ignore[method-assign]
        pages = tensor_at(address, (6, page), torch.uint8, CUDA)
        driver.map(address, *handles)
        driver.set_access(address, 6 * page)
        for index in range(6):
            pages[index].fill_(index + 1)
        torch.cuda.synchronize()
        driver.unmap(address + page, 4 * page)
        assert (log.count("cuMemMap"), log.count("cuMemSetAccess"), log.count("cuMemUnmap")) == (6, 1, 1)
        assert bool((pages[0] == 1).all()) and bool((pages[5] == 6).all()), "their neighbours stay"
        # The addresses are free, and the pages still hold what was written: they go back in another order.
        driver.map(address + page, *handles[4:0:-1])
        driver.set_access(address + page, 4 * page)
        assert [int(value) for value in pages[:, page - 1].cpu()] == [1, 5, 4, 3, 2, 6]
        assert bool((pages == pages[:, :1]).all())
        torch.cuda.synchronize()
        driver.unmap(address, 6 * page)
        assert log.count("cuMemUnmap") == 2 and driver.usage().mappings == 0

    def test_kernels_see_writes_through_an_alias(self, driver: CudaDriver, tier: Tier) -> None:
        page = driver.granularity
        address = driver.reserve(2 * page)
        handle = create(driver, 1, tier)
        driver.map(address, handle)
        driver.map(address + page, handle)
        driver.set_access(address, 2 * page)
        one = tensor_at(address, (page // 2,), torch.bfloat16, CUDA)
        two = tensor_at(address + page, (page // 2,), torch.bfloat16, CUDA)
        for value in range(20):
            one.fill_(value)
            assert bool((two == value).all())
            torch.cuda.synchronize()


def test_the_granularity_is_at_least_a_large_page(driver: CudaDriver) -> None:
    assert driver.granularity % (2 << 20) == 0


def test_tensor_over_a_region_that_is_mostly_unbacked(driver: CudaDriver) -> None:
    page = driver.granularity
    nbytes = 1000 * page
    address = driver.reserve(nbytes)
    stride = page // 2
    records = tensor_at(address, (1000, 64, 32), torch.bfloat16, CUDA, (stride, 32, 1), storage_bytes=nbytes)
    assert records.untyped_storage().nbytes() == nbytes and records.data_ptr() == address
    assert records[999].data_ptr() == address + 999 * page and records.device == CUDA
    back(driver, address + 2 * page, create(driver), page)
    driver.zero(address + 2 * page, page)
    driver.synchronize()
    records[2].fill_(3)
    expected = torch.full((64, 32), 3, dtype=torch.bfloat16)
    assert torch.equal(records[2].cpu(), expected)
    assert driver.read(address + 2 * page, 4096) == bytes(expected.view(torch.uint8).flatten().tolist())
    assert driver.read(address + 2 * page + 4096, 4096) == bytes(4096)


def test_kernels_and_copies_share_host_pages(driver: CudaDriver) -> None:
    """Host pages are open to the device alone: the CPU gets at them by copies."""
    page = driver.granularity
    address = driver.reserve(page)
    back(driver, address, create(driver, 1, Tier.HOST), page)
    driver.write(address, pattern(1, page))
    tensor = tensor_at(address, (page,), torch.uint8, CUDA)
    assert bytes(tensor.cpu().tolist()) == pattern(1, page)
    tensor.fill_(7)
    torch.cuda.synchronize()
    assert driver.read(address, page) == bytes([7]) * page


def test_a_mark_passes_when_the_compute_stream_gets_there(granularity: int) -> None:
    stream = torch.cuda.Stream(CUDA)
    driver = CudaDriver(0, budgets={Tier.HBM: granularity}, compute_stream=lambda: stream.cuda_stream)
    early = driver.mark()
    driver.wait(early)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
    late = driver.mark()
    assert driver.passed(early)
    assert not driver.passed(late)
    driver.wait(late)
    assert driver.passed(late) and stream.query()
    driver.close()


def test_unmap_waits_for_the_copies_of_the_driver(roomy: CudaDriver) -> None:
    address = roomy.reserve(3 * BIG)
    source, target = roomy.create(BIG, Tier.HBM), roomy.create(BIG, Tier.HOST)
    assert source is not None and target is not None
    back(roomy, address, source, BIG)
    back(roomy, address + BIG, target, BIG)
    tensor_at(address, (BIG // 4,), torch.int32, CUDA).copy_(torch.arange(BIG // 4, dtype=torch.int32))
    torch.cuda.synchronize()
    roomy.copy(address + BIG, address, BIG)
    roomy.unmap(address, BIG)
    roomy.unmap(address + BIG, BIG)
    back(roomy, address, target, BIG)
    copied = tensor_at(address, (BIG // 4,), torch.int32, CUDA)
    assert torch.equal(copied, torch.arange(BIG // 4, dtype=torch.int32, device=CUDA))


def test_a_graph_replays_over_remapped_pages(driver: CudaDriver) -> None:
    page = driver.granularity
    address = driver.reserve(page)
    handles = [create(driver, 1, Tier.HBM), create(driver, 1, Tier.HOST)]
    weights = tensor_at(address, (page // 4,), torch.float32, CUDA)
    for value, handle in enumerate(handles):
        back(driver, address, handle, page)
        weights.fill_(value + 1)
        torch.cuda.synchronize()
        driver.unmap(address, page)
    back(driver, address, handles[0], page)
    result = torch.empty_like(weights)
    result.copy_(weights * 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(weights * 3)
    for replay in range(20):
        driver.unmap(address, page)
        back(driver, address, handles[replay % 2], page)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((result == 3 * (replay % 2 + 1)).all())


def test_pages_move_while_a_kernel_runs_elsewhere(driver: CudaDriver) -> None:
    """Mapping and unmapping pages that no kernel reads must not disturb the kernel that runs."""
    page = driver.granularity
    address = driver.reserve(2 * page)
    back(driver, address, create(driver), page)
    busy = tensor_at(address, (page // 4,), torch.int32, CUDA)
    busy.zero_()
    torch.cuda.synchronize()
    moved = create(driver)
    for _ in range(100):
        torch.cuda._sleep(1_000_000)
        for _ in range(10):
            busy.add_(1)
        back(driver, address + page, moved, page)
        driver.unmap(address + page, page)
    assert bool((busy == 1000).all())


def test_device_memory_comes_back(roomy: CudaDriver) -> None:
    address = roomy.reserve(BIG)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(CUDA)[0]
    for cycle in range(50):
        handle = roomy.create(BIG, Tier.HBM)
        assert handle is not None
        back(roomy, address, handle, BIG)
        roomy.zero(address, BIG)
        if cycle == 0:
            roomy.synchronize()
            assert before - torch.cuda.mem_get_info(CUDA)[0] >= BIG
        roomy.unmap(address, BIG)
        roomy.release(handle)
    assert before - torch.cuda.mem_get_info(CUDA)[0] <= 8 << 20


def test_a_device_that_is_full_gives_none(roomy: CudaDriver) -> None:
    before = roomy.usage()
    assert roomy.create(1 << 40, Tier.HBM) is None
    assert roomy.usage() == before


def test_every_thread_may_call_and_torch_notices_nothing(driver: CudaDriver) -> None:
    page = driver.granularity
    seen: list[bytes] = []

    def work() -> None:
        address = driver.reserve(page)
        back(driver, address, create(driver), page)
        driver.write(address, pattern(2, page))
        seen.append(driver.read(address, page))

    allocated = torch.cuda.memory_allocated(CUDA)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [pattern(2, page)]
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(CUDA) == allocated
    assert int(torch.ones(1000, device=CUDA).sum()) == 1000


TOUCH = """
import torch
from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.tensor import tensor_at
driver = CudaDriver(0)
page = driver.granularity
address = driver.reserve(page)
if {mapped}:
    driver.map(address, driver.create(page, Tier.HBM))
if {access}:
    driver.set_access(address, page)
tensor_at(address, (page,), torch.uint8, "cuda:0").add_(1)
torch.cuda.synchronize()
print("survived")
"""


@pytest.mark.parametrize(("mapped", "access"), [(False, False), (True, False), (True, True)])
def test_a_kernel_that_touches_what_it_may_not_faults(mapped: bool, access: bool) -> None:
    """In a process of its own: the fault takes the CUDA context with it."""
    script = TOUCH.format(mapped=mapped, access=access)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    if access:
        assert ended.returncode == 0 and "survived" in ended.stdout, ended.stderr
    else:
        assert ended.returncode != 0 and "illegal memory access" in ended.stderr, ended.stderr


def test_settings_that_cannot_work_are_named(granularity: int) -> None:
    with pytest.raises(ConfigError, match="device=99"):
        CudaDriver(99)
    with pytest.raises(ConfigError, match="peer=0 cannot serve"):
        CudaDriver(0, peer=0)
    with pytest.raises(ConfigError, match="peer=99"):
        CudaDriver(0, peer=99)
    with pytest.raises(ConfigError, match="peer=None cannot serve"):
        CudaDriver(0, budgets={Tier.PEER: granularity})
    with pytest.raises(ConfigError, match="hbm=-1"):
        CudaDriver(0, budgets={Tier.HBM: -1})
    driver = CudaDriver(0, budgets={Tier.HBM: granularity})
    with pytest.raises(DriverError, match="no tier host"):
        driver.create(granularity, Tier.HOST)
    driver.close()
