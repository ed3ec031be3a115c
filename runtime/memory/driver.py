"""The calls VAMP needs from a virtual memory system, the same on a GPU and on a host.

A *reservation* is a run of addresses with nothing behind it. A *handle* is physical memory of one tier.
``map`` puts whole handles behind reserved addresses, ``set_access`` makes them readable and writable,
``unmap`` takes whole mappings away again; touching an address that is not backed is a fault. These are the
rules of CUDA virtual memory management (``cuMemAddressReserve`` and its family), and the host driver keeps
them too, so that bookkeeping proved on a CPU holds on a GPU.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol


class Tier(enum.Enum):
    """Where physical memory lies."""

    HBM = "hbm"
    PEER = "peer"
    HOST = "host"


@dataclass(frozen=True)
class DriverUsage:
    """What a driver holds now, for leak checks. Bytes are of live handles."""

    reservations: int
    mappings: int
    handles: int
    tier_bytes: dict[Tier, int] = field(default_factory=dict)


class MemoryDriver(Protocol):
    """Addresses, handles and mappings. Every call raises ``DriverError`` on refusal, changing nothing.

    Copies and zeroing are ordered among themselves and may run behind the caller; ``synchronize`` waits
    for them. Unmapping waits for nothing: the caller must know that no kernel reads those addresses.
    """

    @property
    def granularity(self) -> int:
        """Bytes; every address, size and handle is a multiple."""

    @property
    def tiers(self) -> frozenset[Tier]:
        """Tiers that ``create`` can serve on this machine."""

    def bind_thread(self) -> None:
        """Prepare the calling thread for many calls. Never needed, and spares each call a little."""

    def reserve(self, nbytes: int) -> int:
        """Address of a new reservation of ``nbytes``, nothing behind it."""

    def free(self, address: int, nbytes: int) -> None:
        """Give back exactly one reservation; every mapping in it must be gone."""

    def create(self, nbytes: int, tier: Tier) -> int | None:
        """A handle of ``nbytes`` of physical memory, or ``None`` where the tier has no room left."""

    def release(self, handle: int) -> None:
        """Give back a handle that is mapped nowhere."""

    def map(self, address: int, *handles: int) -> None:
        """Put all of each handle, one behind the other, behind reserved, unbacked addresses from ``address``.

        Grants no access. A handle may lie behind several addresses at once.
        """

    def set_access(self, address: int, nbytes: int) -> None:
        """Make a fully mapped range readable and writable, by kernels of this device and by copies."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Take away the mappings in a range that covers each of them whole."""

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Copy between accessible ranges that do not overlap.

        On ``stream``, the handle of a stream of the device, it is for the caller to order: ``synchronize``
        and ``unmap`` know nothing of it.
        """

    def zero(self, address: int, nbytes: int) -> None:
        """Clear an accessible range."""

    def synchronize(self) -> None:
        """Return when every earlier ``copy`` and ``zero`` has been done."""

    def mark(self) -> object:
        """A mark after all work queued so far on the device's compute stream."""

    def passed(self, mark: object) -> bool:
        """Whether the work before ``mark`` is done. Never blocks."""

    def wait(self, mark: object) -> None:
        """Return when the work before ``mark`` is done."""

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes of an accessible range, after every earlier copy. For checks; slow on a GPU."""

    def write(self, address: int, data: bytes) -> None:
        """Store bytes into an accessible range. For loading and tests; slow on a GPU."""

    def usage(self) -> DriverUsage:
        """What is held now."""

    def close(self) -> None:
        """Give back everything; the driver is unusable afterwards."""
