from __future__ import annotations

import ctypes
import errno
import faulthandler
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.driver_suite import BUDGET_PAGES, DriverSuite, back, create, pattern

from vamp_runtime.errors import ConfigError, DriverError, StateLost
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.host import HostDriver

PAGE = 65536


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(PAGE, dict.fromkeys(Tier, BUDGET_PAGES * PAGE))
    yield driver
    driver.close()


class TestHostDriver(DriverSuite):
    pass


def open_memory() -> dict[str, int]:
    """Bytes that each open memfd of a driver really takes."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        name = os.readlink(link) if link.is_symlink() else ""
        if name.startswith("/memfd:vamp-"):
            found[name.removeprefix("/memfd:vamp-").split()[0]] = os.stat(link).st_blocks * 512
    return found


def areas(address: int, nbytes: int) -> list[str]:
    """The system's areas inside a range, as permissions and name."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        start, end = (int(part, 16) for part in fields[0].split("-"))
        if start < address + nbytes and end > address:
            found.append(fields[1] + " " + (fields[5] if len(fields) > 5 else ""))
    return found


def fate(touch: Callable[[], object]) -> int:
    """The signal that ends a forked child which does ``touch``; 0 when it survives."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        touch()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_pages_without_backing_or_access_fault(driver: HostDriver) -> None:
    address = driver.reserve(2 * PAGE)
    handle = create(driver)

    def peek() -> bytes:
        return ctypes.string_at(address, 1)

    assert fate(peek) == signal.SIGSEGV
    driver.map(address, handle)
    assert fate(peek) == signal.SIGSEGV
    driver.set_access(address, PAGE)
    assert fate(peek) == 0
    assert fate(lambda: ctypes.string_at(address + PAGE, 1)) == signal.SIGSEGV
    driver.unmap(address, PAGE)
    assert fate(peek) == signal.SIGSEGV


def test_released_memory_leaves_the_system(driver: HostDriver) -> None:
    handles = [create(driver, 2, Tier.HOST) for _ in range(3)]
    assert open_memory() == {"hbm": 0, "peer": 0, "host": 6 * PAGE}
    driver.release(handles[1])
    assert open_memory()["host"] == 4 * PAGE
    address = driver.reserve(2 * PAGE)
    back(driver, address, handles[0], 2 * PAGE)
    driver.write(address, pattern(1, 2 * PAGE))
    driver.unmap(address, 2 * PAGE)
    driver.release(handles[0])
    again = create(driver, 2, Tier.HOST)
    back(driver, address, again, 2 * PAGE)
    assert driver.read(address, 2 * PAGE) == bytes(2 * PAGE)


def test_the_system_holds_what_it_held_before() -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    driver = HostDriver(PAGE, {Tier.HBM: 4 * PAGE})
    opened = len(list(Path("/proc/self/fd").iterdir()))
    address = driver.reserve(8 * PAGE)
    bare = areas(address, 8 * PAGE)
    assert len(bare) == 1 and bare[0].startswith("---p")
    handles = [create(driver) for _ in range(4)]
    for _ in range(500):
        for index, handle in enumerate(handles):
            driver.map(address + 2 * index * PAGE, handle)
        driver.set_access(address, PAGE)
        for index in range(4):
            driver.unmap(address + 2 * index * PAGE, PAGE)
    assert areas(address, 8 * PAGE) == bare
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    driver.close()
    assert not areas(address, 8 * PAGE)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert open_memory() == {}


def test_runs_are_joined_again() -> None:
    driver = HostDriver(PAGE, {Tier.HBM: 6 * PAGE})
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)):
        handles = [create(driver, 2) for _ in range(3)]
        for index in order:
            driver.release(handles[index])
        whole = create(driver, 6)
        driver.release(whole)
    driver.close()


class RefusingLibc:
    """The C library, except that calls of one name fail with ``ENOMEM``, from the first or a later one."""

    def __init__(self, libc: Any, name: str, skip: int = 0, times: int = 1) -> None:
        self._libc, self._name, self._skip, self._times = libc, name, skip, times

    def __getattr__(self, name: str) -> Any:
        return self._maybe if name == self._name else getattr(self._libc, name)

    def _maybe(self, *args: Any) -> Any:
        if self._skip or not self._times:
            self._skip = max(self._skip - 1, 0)
            return getattr(self._libc, self._name)(*args)
        self._times -= 1
        ctypes.set_errno(errno.ENOMEM)
        return ctypes.c_void_p(-1).value if self._name == "mmap" else -1


@pytest.mark.parametrize(("call", "name"), [("map", "mmap"), ("set_access", "mprotect"), ("unmap", "mmap")])
def test_what_the_system_refuses_is_undone(driver: HostDriver, call: str, name: str) -> None:
    address = driver.reserve(3 * PAGE)
    first, second, third = create(driver), create(driver), create(driver)
    back(driver, address, first, PAGE)
    driver.write(address, pattern(2, PAGE))
    driver.map(address + PAGE, second)
    before = driver.usage()
    calls = {
        "map": lambda: driver.map(address + 2 * PAGE, third),
        "set_access": lambda: driver.set_access(address, 2 * PAGE),
        "unmap": lambda: driver.unmap(address, 2 * PAGE),
    }
    libc = driver._libc
    driver._libc = RefusingLibc(libc, name)  # type: ignore[assignment]
    with pytest.raises(DriverError, match=f"{call}: ENOMEM"):
        calls[call]()
    assert driver.usage() == before
    assert driver.read(address, PAGE) == pattern(2, PAGE)
    assert fate(lambda: ctypes.string_at(address + PAGE, 1)) == signal.SIGSEGV
    calls[call]()
    driver._libc = libc


@pytest.mark.parametrize("call", ["map", "unmap"])
def test_what_cannot_be_undone_is_said(driver: HostDriver, call: str) -> None:
    address = driver.reserve(PAGE)
    handle = create(driver)
    if call == "unmap":
        back(driver, address, handle, PAGE)
    libc = driver._libc
    driver._libc = RefusingLibc(libc, "mmap", times=2)  # type: ignore[assignment]
    with pytest.raises(StateLost, match="not restored"):
        driver.map(address, handle) if call == "map" else driver.unmap(address, PAGE)
    driver._libc = libc


def test_a_reservation_that_cannot_be(driver: HostDriver) -> None:
    with pytest.raises(DriverError, match="reserve: ENOMEM"):
        driver.reserve(1 << 55)
    assert driver.usage().reservations == 0


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigError, match=r"granularity=5000 .* use 4096"):
        HostDriver(mmap.PAGESIZE + 904)
    with pytest.raises(ConfigError, match="granularity=0"):
        HostDriver(0)
    with pytest.raises(ConfigError, match="offers no tier"):
        HostDriver(PAGE, {})
    with pytest.raises(ConfigError, match="host=-1"):
        HostDriver(PAGE, {Tier.HOST: -1})
    assert open_memory() == {}


def test_tiers_are_those_with_a_budget() -> None:
    driver = HostDriver(PAGE)
    assert driver.tiers == {Tier.HBM, Tier.HOST}
    driver.close()
    driver = HostDriver(PAGE, {Tier.PEER: 2 * PAGE + 17})
    assert driver.tiers == {Tier.PEER}
    with pytest.raises(DriverError, match="no tier hbm"):
        driver.create(PAGE, Tier.HBM)
    assert driver.create(2 * PAGE, Tier.PEER) is not None
    assert driver.create(PAGE, Tier.PEER) is None
    driver.close()
