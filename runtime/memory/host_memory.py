"""How much host memory this process can still get: its cgroups' limits, what the kernel says, or a trial."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# A limit of cgroup v1 that was never set reads as the largest number of whole pages.
_NO_LIMIT = 1 << 60

# Takes memory in pieces and says so, as the process that the kernel ends first where there is none left.
_TRIAL = """
import contextlib, mmap, sys
with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
left, kept = int(sys.argv[1]), []
while left:
    size = min(left, 1 << 28)
    kept.append(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
    left -= size
    print(size, flush=True)
"""


@dataclass(frozen=True)
class CgroupLimit:
    """A memory limit of one of this process's cgroups, and what counts against it; bytes.

    ``used`` leaves out file pages, which the kernel gives up for others.
    """

    path: str
    limit: int
    used: int

    @property
    def room(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class HostMemory:
    """Bytes. ``cgroup`` is the limit that leaves the least room, ``None`` where there is no limit.

    On some virtual machines ``total`` and ``available`` grow as memory is touched: too little of them proves
    nothing.
    """

    total: int
    available: int
    cgroup: CgroupLimit | None


@dataclass(frozen=True)
class Room:
    """Bytes that can be had, and how that is known."""

    nbytes: int
    source: str


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """What the system says now; ``root`` is where ``/proc`` and ``/sys`` lie."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    kib = {fields[0].rstrip(":"): int(fields[1]) for fields in lines if len(fields) > 1}
    limits = list(_limits(root))
    return HostMemory(
        total=kib["MemTotal"] * 1024,
        available=kib.get("MemAvailable", kib["MemFree"]) * 1024,
        cgroup=min(limits, key=lambda limit: limit.room, default=None),
    )


def room_for(nbytes: int, memory: HostMemory, trial: Callable[[int], int]) -> Room:
    """Whether ``nbytes`` more can be had: ``Room.nbytes`` is below it where they cannot.

    Args:
        trial: takes that many bytes for a moment and returns how many it got; asked only where neither a
            limit forbids them nor the kernel has them ready.
    """
    cgroup = memory.cgroup
    if cgroup is not None and cgroup.room < nbytes:
        return Room(cgroup.room, f"the limit of {cgroup.limit / 2**30:.1f} GiB in {cgroup.path}")
    if memory.available >= nbytes:
        room = memory.available if cgroup is None else min(memory.available, cgroup.room)
        return Room(room, "what the system has available")
    return Room(trial(nbytes), "a trial allocation")


def try_allocation(nbytes: int) -> int:
    """Bytes, up to ``nbytes``, that a process of its own could take and touch; they are free again."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _TRIAL, str(nbytes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return sum(int(line) for line in done.stdout.split())


def _limits(root: Path) -> Iterator[CgroupLimit]:
    """Every memory limit between this process's cgroups and the root of their hierarchy."""
    memberships = root / "proc/self/cgroup"
    for line in memberships.read_text().splitlines() if memberships.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                yield from _walk(root, mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _walk(root, "sys/fs/cgroup/memory", path, *files)


def _walk(
    root: Path, mount: str, path: str, limit_name: str, usage_name: str, prefix: str
) -> Iterator[CgroupLimit]:
    # Inside a container the path may be the host's, and only the top of it can be seen.
    inside = PurePosixPath(path.lstrip("/"))
    for part in (inside, *inside.parents) if path.strip("/") else (inside,):
        folder = root / mount / part
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is None or usage is None or limit >= _NO_LIMIT:
            continue
        files = _statistic(folder / "memory.stat", f"{prefix}inactive_file", f"{prefix}active_file")
        name = f"/{(PurePosixPath(mount) / part / limit_name).as_posix()}"
        yield CgroupLimit(name, limit, max(0, usage - files))


def _number(path: Path) -> int | None:
    """The number in a file; ``None`` where there is no such file or it says ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, *names: str) -> int:
    """Sum of the named lines of a ``memory.stat``."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(value) for name, value in lines if name in names)
