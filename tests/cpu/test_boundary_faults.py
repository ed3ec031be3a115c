from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.boundary_suite import FaultSuite, PeerSuite
from support.deferring import DeferringDriver

from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.host import HostDriver


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(4096)
    yield driver
    driver.close()


class TestFaults(FaultSuite):
    pass


class TestFaultsWithPeerHomes(PeerSuite, FaultSuite):
    @pytest.fixture
    def driver(self) -> Iterator[HostDriver]:
        driver = HostDriver(4096, dict.fromkeys(Tier, 1 << 24))
        yield driver
        driver.close()


class TestFaultsWithCopiesPutOff(FaultSuite):
    @pytest.fixture
    def driver(self, driver: HostDriver) -> DeferringDriver:
        return DeferringDriver(driver)
