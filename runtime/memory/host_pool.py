"""Physical memory of the host driver: a memfd of fixed capacity, given out in runs."""

from __future__ import annotations

import ctypes
import errno
import os

from vamp_runtime.errors import DriverError

_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02  # linux/falloc.h


class HostPool:
    """One tier's memory. Runs come first-fit from a free list and are committed at once.

    Args:
        libc: the C library, loaded with ``use_errno``.
        name: shows in ``/proc/self/maps``.
        capacity: bytes; the file is sparse, so only runs that are out take memory.
    """

    def __init__(self, libc: ctypes.CDLL, name: str, capacity: int) -> None:
        self._libc = libc
        self.capacity = capacity
        self.fd = os.memfd_create(name)
        try:
            os.ftruncate(self.fd, capacity)
        except OSError:
            os.close(self.fd)
            raise
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []

    def take(self, nbytes: int) -> int | None:
        """Offset of a run that was free, its memory committed; ``None`` where no run is that long."""
        index = next((i for i, (_, length) in enumerate(self._free) if length >= nbytes), None)
        if index is None:
            return None
        offset, length = self._free[index]
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            self._punch("create", offset, nbytes)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                return None
            raise DriverError("create", errno.errorcode.get(error.errno or 0, str(error))) from error
        self._free[index : index + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Return a run; its memory goes back to the system and it is joined with its free neighbours."""
        self._punch("release", offset, nbytes)
        index = next((i for i, (start, _) in enumerate(self._free) if start > offset), len(self._free))
        first, end = offset, offset + nbytes
        if index < len(self._free):
            start, length = self._free[index]
            assert end <= start, "a run was given back twice"
            if end == start:
                end += length
                del self._free[index]
        if index:
            start, length = self._free[index - 1]
            assert start + length <= offset, "a run was given back twice"
            if start + length == offset:
                first = start
                index -= 1
                del self._free[index]
        self._free.insert(index, (first, end - first))

    def close(self) -> None:
        os.close(self.fd)
        self._free.clear()

    def _punch(self, call: str, offset: int, nbytes: int) -> None:
        if self._libc.fallocate(self.fd, _KEEP_SIZE_PUNCH_HOLE, offset, nbytes):
            raise DriverError(call, errno.errorcode[ctypes.get_errno()])
