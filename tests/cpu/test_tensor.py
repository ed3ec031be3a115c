from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.tensor import tensor_at

PAGE = 65536
DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn]


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(PAGE, {Tier.HBM: 8 * PAGE})
    yield driver
    driver.close()


def back(driver: HostDriver, address: int) -> int:
    handle = driver.create(PAGE, Tier.HBM)
    assert handle is not None
    driver.map(address, handle)
    driver.set_access(address, PAGE)
    return handle


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_and_address_are_the_same_bytes(driver: HostDriver, dtype: torch.dtype) -> None:
    address = driver.reserve(PAGE)
    back(driver, address)
    tensor = tensor_at(address, (16, 32), dtype, "cpu")
    values = torch.arange(512).reshape(16, 32).remainder(16).to(dtype)
    tensor.copy_(values)
    assert driver.read(address, values.nbytes) == bytes(values.view(torch.uint8).flatten().tolist())
    assert tensor.dtype == dtype and tensor.data_ptr() == address and tensor.is_contiguous()
    assert tensor.untyped_storage().nbytes() == values.nbytes
    driver.zero(address, PAGE)
    assert not tensor.view(torch.uint8).any()


def test_records_over_a_region_that_is_mostly_unbacked(driver: HostDriver) -> None:
    """Record 2 of 1,000 is backed; nothing but an operation on another record may touch the others."""
    nbytes = 1000 * PAGE
    address = driver.reserve(nbytes)
    back(driver, address + 2 * PAGE)
    stride = PAGE // torch.float16.itemsize
    records = tensor_at(address, (1000, 8, 16), torch.float16, "cpu", (stride, 16, 1), storage_bytes=nbytes)
    records[2].fill_(3)
    part = records.transpose(1, 2)[2, :, 4]
    assert part.tolist() == [3.0] * 16
    assert records.untyped_storage().nbytes() == nbytes and records.storage_offset() == 0
    assert records[999].data_ptr() == address + 999 * PAGE
    expected = torch.full((128,), 3, dtype=torch.float16)
    assert driver.read(address + 2 * PAGE, 256) == expected.numpy().tobytes()
    assert driver.read(address + 2 * PAGE + 256, PAGE - 256) == bytes(PAGE - 256)


def test_the_page_behind_a_tensor_changes(driver: HostDriver) -> None:
    address, other = driver.reserve(PAGE), driver.reserve(PAGE)
    first = back(driver, address)
    tensor = tensor_at(address, (4,), torch.int32, "cpu")
    tensor.fill_(7)
    driver.unmap(address, PAGE)
    back(driver, address)
    assert tensor.tolist() == [0, 0, 0, 0]
    driver.unmap(address, PAGE)
    driver.map(other, first)
    driver.set_access(other, PAGE)
    assert tensor_at(other, (4,), torch.int32, "cpu").tolist() == [7] * 4


def test_scalars_and_empty_tensors(driver: HostDriver) -> None:
    address = driver.reserve(PAGE)
    back(driver, address)
    assert tensor_at(address, (), torch.int64, "cpu").item() == 0
    assert tensor_at(address, (0, 5), torch.int64, "cpu").untyped_storage().nbytes() == 0


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "storage_bytes"),
    [
        (1, (4,), None, None),
        (0, (4,), (1, 1), None),
        (0, (4, 4), (-4, 1), None),
        (0, (-1,), None, None),
        (0, (4, 4), None, 63),
        (0, (2, 4), (1024, 1), 4096),
    ],
)
def test_impossible_tensors_are_refused(
    driver: HostDriver,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    storage_bytes: int | None,
) -> None:
    address = driver.reserve(PAGE)
    with pytest.raises(ValueError):
        tensor_at(address + offset, shape, torch.float32, "cpu", strides, storage_bytes)
