"""The memory driver of an NVIDIA GPU: CUDA virtual memory management through ``cuda.bindings``."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn, ParamSpec, TypeVar

from vamp_runtime.errors import ConfigError, DriverError, StateLost
from vamp_runtime.memory.address_space import AddressSpace, Handle, Mapping, check_budgets
from vamp_runtime.memory.cuda_api import CudaApi, access_list, allocation_prop, require_tiers
from vamp_runtime.memory.cuda_marks import CudaMarks
from vamp_runtime.memory.driver import DriverUsage, Tier
from vamp_runtime.memory.transaction import Transaction

P = ParamSpec("P")
T = TypeVar("T")


def _locked(call: Callable[P, T]) -> Callable[P, T]:
    """Hold the lock of the driver, the first argument, and keep its context current, for a whole call."""

    @functools.wraps(call)
    def inside(*args: P.args, **named: P.kwargs) -> T:
        driver: Any = args[0]
        with driver._lock, driver._api.held():
            return call(*args, **named)

    return inside


class CudaDriver:
    """``MemoryDriver`` on one GPU, in its primary context, beside torch.

    A thread that moves pages and one that queues copies on streams of its own may share it: a lock guards the
    bookkeeping, and is held for no longer than a call.

    Copies and zeroing run on a stream of the driver's own, at the lowest priority. ``unmap`` waits for those
    of them that use the range; kernels on other streams are the caller's to wait for.

    Args:
        device: CUDA ordinal of the GPU whose kernels use the memory.
        peer: ordinal of a GPU joined to it, for the peer tier.
        budgets: bytes of each tier the driver offers, at most. Default: HBM, HOST and, with ``peer``, PEER,
            each until the system refuses.
        compute_stream: the CUDA stream handle that ``mark`` records on. Default: the legacy default stream.

    Raises:
        ConfigError: cuda-bindings, the device, or something a tier needs of it is missing.
    """

    def __init__(
        self,
        device: int = 0,
        peer: int | None = None,
        budgets: MappingOf[Tier, int] | None = None,
        compute_stream: Callable[[], int] | None = None,
    ) -> None:
        offered = {Tier.HBM, Tier.HOST} | ({Tier.PEER} if peer is not None else set())
        self._tiers = frozenset(offered if budgets is None else budgets)
        self._budgets = dict(budgets or {})
        if budgets is not None:
            check_budgets(budgets)
        self._used = dict.fromkeys(self._tiers, 0)
        self._busy: set[int] = set()
        self._lock = threading.RLock()
        self._api = CudaApi(device)
        self._marks = CudaMarks(self._api, compute_stream)
        try:
            require_tiers(self._api, self._tiers, peer)
            ordered = [tier for tier in Tier if tier in self._tiers]
            self._props = {tier: allocation_prop(self._api, tier, peer) for tier in ordered}
            self._access = access_list(self._api)
            self._space = AddressSpace(self._common_granularity())
            self._stream = self._low_priority_stream()
            for tier in ordered:
                self._try_move(tier)
        except ConfigError:
            self._api.close()
            raise

    @property
    def granularity(self) -> int:
        return self._space.granularity

    @property
    def tiers(self) -> frozenset[Tier]:
        return self._tiers

    def bind_thread(self) -> None:
        self._api.bind_thread()

    def reserve(self, nbytes: int) -> int:
        self._space.check_size("reserve", nbytes)
        if not self._tiers:
            raise DriverError("reserve", "the driver is closed")
        address = int(self._api.call("cuMemAddressReserve", nbytes, self.granularity, 0, 0))
        self._space.add_reservation(address, nbytes)
        return address

    def free(self, address: int, nbytes: int) -> None:
        self._space.check_free(address, nbytes)
        self._api.call("cuMemAddressFree", address, nbytes)
        self._space.drop_reservation(address)

    def create(self, nbytes: int, tier: Tier) -> int | None:
        self._space.check_size("create", nbytes)
        if tier not in self._tiers:
            raise DriverError("create", f"this driver has no tier {tier.value}")
        if tier in self._budgets and self._used[tier] + nbytes > self._budgets[tier]:
            return None
        try:
            raw = int(self._api.call("cuMemCreate", nbytes, self._props[tier], 0))
        except DriverError as error:
            if error.detail == "CUDA_ERROR_OUT_OF_MEMORY":
                return None
            raise
        self._used[tier] += nbytes
        return self._space.add_handle(Handle(nbytes, tier, raw))

    def release(self, handle: int) -> None:
        found = self._space.check_release(handle)
        self._api.call("cuMemRelease", found.raw)
        self._space.drop_handle(handle)
        self._used[found.tier] -= found.nbytes

    @_locked
    def map(self, address: int, *handles: int) -> None:
        found = self._space.check_map(address, handles)
        for index, mapping in enumerate(found):
            try:
                self._map(mapping)
            except DriverError as error:
                self._restore(found[:index], error, unmap=True, remap=False)
        self._space.add_mappings(found)

    @_locked
    def set_access(self, address: int, nbytes: int) -> None:
        found = self._space.check_whole("set_access", address, nbytes)
        try:
            for run in self._space.runs(found):
                self._open(run)
        except DriverError as error:
            # Nothing uses these yet, so mapping them anew is a safe way to take all access away.
            closed = [mapping for mapping in found if not self._space.accessible(mapping)]
            self._restore(closed, error, unmap=True)
        self._space.grant(found)

    @_locked
    def unmap(self, address: int, nbytes: int) -> None:
        found = self._space.check_whole("unmap", address, nbytes)
        if not self._busy.isdisjoint(mapping.address for mapping in found):
            self.synchronize()
        gone: list[Mapping] = []
        for run in self._space.runs(found):
            try:
                self._unmap(run)
            except DriverError as error:
                if len(run) > 1:
                    # Some of them may be gone. One that stays in spite of this cannot be mapped again.
                    for mapping in run:
                        with suppress(DriverError):
                            self._unmap([mapping])
                    gone += run
                self._restore(gone, error)
            gone += run
        self._space.drop_mappings(found)

    @_locked
    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        found = self._space.check_copy(target, source, nbytes)
        if stream is None:
            self._busy.update(mapping.address for mapping in found)
        # One copy must not span two tiers: the driver takes the kind of memory from the first byte.
        seams = self._space.seams(target, nbytes) + self._space.seams(source, nbytes)
        for start, end in pairwise(sorted({0, nbytes, *seams})):
            on = self._stream if stream is None else stream
            self._api.call("cuMemcpyAsync", target + start, source + start, end - start, on)

    @_locked
    def zero(self, address: int, nbytes: int) -> None:
        found = self._space.check_accessible("zero", address, nbytes)
        self._busy.update(mapping.address for mapping in found)
        for start, end in pairwise([0, *self._space.seams(address, nbytes), nbytes]):
            self._api.call("cuMemsetD8Async", address + start, 0, end - start, self._stream)

    def synchronize(self) -> None:
        self._api.call("cuStreamSynchronize", self._stream)
        self._busy.clear()

    def mark(self) -> object:
        return self._marks.mark()

    def passed(self, mark: object) -> bool:
        return self._marks.passed(mark)

    def wait(self, mark: object) -> None:
        self._marks.wait(mark)

    @_locked
    def read(self, address: int, nbytes: int) -> bytes:
        self._space.check_accessible("read", address, nbytes)
        buffer = ctypes.create_string_buffer(nbytes)
        for start, end in pairwise([0, *self._space.seams(address, nbytes), nbytes]):
            inside = ctypes.addressof(buffer) + start
            self._api.call("cuMemcpyAsync", inside, address + start, end - start, self._stream)
        self.synchronize()
        return buffer.raw

    @_locked
    def write(self, address: int, data: bytes) -> None:
        self._space.check_accessible("write", address, len(data))
        buffer = ctypes.create_string_buffer(data, len(data))
        for start, end in pairwise([0, *self._space.seams(address, len(data)), len(data)]):
            inside = ctypes.addressof(buffer) + start
            self._api.call("cuMemcpyAsync", address + start, inside, end - start, self._stream)
        self.synchronize()

    def usage(self) -> DriverUsage:
        return self._space.usage()

    def close(self) -> None:
        if not self._tiers:
            return
        self.synchronize()
        for address, nbytes in list(self._space.reservations.items()):
            for mapping in self._space.mappings(address, nbytes):
                self.unmap(mapping.address, mapping.nbytes)
            self.free(address, nbytes)
        for handle in list(self._space.handles):
            self.release(handle)
        self._marks.close()
        self._api.call("cuStreamDestroy", self._stream)
        self._api.close()
        self._tiers = frozenset()

    def _low_priority_stream(self) -> Any:
        lowest, _ = self._api.call("cuCtxGetStreamPriorityRange")
        flags = self._api.driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return self._api.call("cuStreamCreateWithPriority", flags, lowest)

    def _common_granularity(self) -> int:
        """Smallest size that is a whole number of pages of every tier, bytes (all are powers of two)."""
        minimum = self._api.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        props = self._props.values()
        return max(int(self._api.call("cuMemGetAllocationGranularity", prop, minimum)) for prop in props)

    def _try_move(self, tier: Tier) -> None:
        """Back, use and give back two neighbouring granules: attributes have promised too much before."""
        page = self.granularity
        count = min(2, self._budgets.get(tier, 2 * page) // page)
        nbytes = count * page
        if not count:
            return
        try:
            with Transaction() as undone:
                handles: list[int] = []
                while len(handles) < count:
                    handle = self.create(page, tier)
                    if handle is None:
                        wanted = f"{nbytes} bytes"
                        raise ConfigError(f"tier {tier.value} has no room for {wanted}; free memory first")
                    undone.on_undo(partial(self.release, handle))
                    handles.append(handle)
                address = self.reserve(nbytes)
                undone.on_undo(lambda: self.free(address, nbytes))
                self.map(address, *handles)
                undone.on_undo(lambda: self.unmap(address, nbytes))
                self.set_access(address, nbytes)
                self.zero(address, nbytes)
                self.synchronize()
        except DriverError as error:
            raise ConfigError(
                f"tier {tier.value} on device={self._api.ordinal} failed a trial move ({error}); "
                "use budgets without this tier, or another GPU"
            ) from error

    def _map(self, mapping: Mapping) -> None:
        raw = self._space.handles[mapping.handle].raw
        self._api.quick("cuMemMap", mapping.address, mapping.nbytes, 0, raw, 0)

    def _open(self, run: Sequence[Mapping]) -> None:
        granted = (self._access, len(self._access))
        self._api.call("cuMemSetAccess", run[0].address, sum(each.nbytes for each in run), *granted)

    def _unmap(self, run: Sequence[Mapping]) -> None:
        self._api.call("cuMemUnmap", run[0].address, sum(each.nbytes for each in run))

    def _restore(
        self, found: Sequence[Mapping], reason: DriverError, unmap: bool = False, remap: bool = True
    ) -> NoReturn:
        """Bring mappings back to what the bookkeeping says after a call failed half-way."""
        try:
            for mapping in found:
                if unmap:
                    self._unmap([mapping])
                if remap:
                    self._map(mapping)
                    if self._space.accessible(mapping):
                        self._open([mapping])
        except DriverError as failure:
            raise StateLost(f"{reason}, and undoing it failed: {failure}") from failure
        raise reason
