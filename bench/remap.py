"""Times the driver calls of a move, and whole moves, on the host or CUDA memory driver.

    python bench/remap.py --driver cuda --out-dir bench/results/h200

Prints a table and writes a JSON of rows (operation, mib, busy, us_median, us_p99, us_max). Host clock around
each call; ``busy`` rows run while the GPU's compute stream has matrix products queued. A move is timed from
request to publish on one rank, with agreement of that rank alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vamp_integration.replay.child import device_name, versions
from vamp_integration.replay.report import write_atomically
from vamp_runtime.memory.agreement import SoleRank
from vamp_runtime.memory.boundary import Boundary
from vamp_runtime.memory.driver import MemoryDriver, Tier
from vamp_runtime.memory.geometry import KVGeometry, SlabGeometry
from vamp_runtime.memory.kv_region import KVRegion
from vamp_runtime.memory.ledger import PageLedger
from vamp_runtime.memory.slab import ExpertSlab

MIB = 1 << 20


def make_driver(name: str) -> MemoryDriver:
    if name == "cuda":
        from vamp_runtime.memory.cuda import CudaDriver

        return CudaDriver()
    from vamp_runtime.memory.host import HostDriver

    return HostDriver(granularity=2 * MIB)


def calls(driver: MemoryDriver, nbytes: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds of each driver call on one page of ``nbytes``."""
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        times.setdefault(name, []).append((time.perf_counter() - start) * 1e6)
        return result

    address = driver.reserve(2 * nbytes)
    home = driver.create(nbytes, Tier.HOST)
    assert home is not None
    driver.map(address + nbytes, home)
    driver.set_access(address + nbytes, nbytes)
    driver.write(address + nbytes, bytes(range(256)) * (nbytes // 256))
    for _ in range(repeats):
        page = timed("create", lambda: driver.create(nbytes, Tier.HBM))
        timed("map", lambda page=page: driver.map(address, page))
        timed("set_access", lambda: driver.set_access(address, nbytes))
        timed("zero", lambda: (driver.zero(address, nbytes), driver.synchronize()))
        timed(
            "copy host to hbm", lambda: (driver.copy(address, address + nbytes, nbytes), driver.synchronize())
        )
        timed("unmap", lambda: driver.unmap(address, nbytes))
        timed("release", lambda page=page: driver.release(page))
    driver.unmap(address + nbytes, nbytes)
    driver.release(home)
    driver.free(address, 2 * nbytes)
    return times


def moves(
    driver: MemoryDriver, layers: int, expert_bytes: int, repeats: int
) -> tuple[int, dict[str, list[float]]]:
    """Bytes of one level, and microseconds of moving it to KV and back, experts verified at the end."""
    slab_geometry = SlabGeometry.plan(layers, 16, (expert_bytes,), driver.granularity, 0.5)
    page = slab_geometry.page_bytes
    pages = slab_geometry.pages_per_level * (1 + slab_geometry.max_level)
    kv = KVGeometry(1, page, pages * page, pages, page)
    ledger = PageLedger(page)
    slab = ExpertSlab(driver, ledger, slab_geometry)
    for layer in range(layers):
        for expert in range(slab_geometry.experts):
            pattern = bytes([1 + (layer * 16 + expert) % 255]) * 4096
            driver.write(slab.address(layer, 0, expert), pattern)
    slab.seal()
    slab.refresh_homes(1 << 60)
    region = KVRegion(driver, ledger, kv, pages=slab_geometry.pages_per_level)
    boundary = Boundary(slab, region, SoleRank(), driver)
    times: dict[str, list[float]] = {"offload a level": [], "restore a level": []}
    for _ in range(repeats):
        for name, move in (("offload a level", boundary.offload), ("restore a level", boundary.restore)):
            outcome = move(1)
            assert outcome.ok, outcome.reason
            times[name].append(outcome.seconds * 1e6)
    slab.verify_all()
    boundary.check_integrity()
    boundary.close()
    return slab_geometry.pages_per_level * page, times


@contextmanager
def load(busy: bool) -> Iterator[None]:
    """Keeps the compute stream full of matrix products inside the block."""
    if not busy:
        yield
        return
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(4000):
            a @ a
    yield
    torch.cuda.synchronize()


def rows_of(times: dict[str, list[float]], nbytes: int, busy: bool) -> list[dict[str, Any]]:
    def row(operation: str, sample: list[float]) -> dict[str, Any]:
        figures = sorted(sample)
        return {
            "operation": operation,
            "mib": nbytes / MIB,
            "busy": busy,
            "us_median": round(statistics.median(figures), 1),
            "us_p99": round(figures[int(0.99 * (len(figures) - 1))], 1),
            "us_max": round(figures[-1], 1),
            "samples": len(figures),
        }

    return [row(operation, sample[len(sample) // 10 :]) for operation, sample in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--driver", choices=("host", "cuda"), default="host")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--expert-mib", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--commit", help="recorded commit, where the tree has no git")
    parser.add_argument("--out-dir", type=Path, default=Path("out"))
    options = parser.parse_args()
    driver = make_driver(options.driver)
    rows: list[dict[str, Any]] = []
    for busy in (False, True) if options.driver == "cuda" else (False,):
        with load(busy):
            for mib in (2, options.expert_mib):
                rows += rows_of(calls(driver, mib * MIB, options.repeats), mib * MIB, busy)
            level, times = moves(driver, options.layers, options.expert_mib * MIB, options.repeats)
            rows += rows_of(times, level, busy)
    for row in rows:
        figures = "{us_median:9.1f} {us_p99:9.1f} {us_max:9.1f} us".format(**row)
        print(f"{row['operation']:18} {row['mib']:7.0f} MiB  busy {row['busy']!s:5}  {figures}")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    date = datetime.now(UTC).date().isoformat()
    record = {
        "name": "remap",
        "date": date,
        "commit": options.commit or head.stdout.strip() or None,
        "command": shlex.join(["python", *sys.argv]),
        "device": device_name(),
        "versions": versions(),
        "notes": [
            "host clock around each call; copies and zeroing include the wait for their end",
            f"a level is {options.layers} groups of one {options.expert_mib} MiB expert; one rank",
            "the first tenth of each sample is left out",
        ],
        "rows": rows,
    }
    write_atomically(options.out_dir / f"{date}-remap.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
