"""Growth and restore at the size of a real model, without an engine: how long, and what steps notice.

    python bench/moves.py --breakdown --json moves.json

Builds slab, homes and KV region as the GPU engine does and moves levels in turn, three ways: ``inline``, on
the thread of the steps; ``beside``, on a thread of its own while the device is idle; and ``beside_steps``,
while the main thread replays a CUDA graph of ``--step-ms`` and works in Python for ``--python-ms`` a step, as
an engine's scheduler and model runner do. The bubble of a move is the time that its steps took beyond as many
median steps. Groups that leave lie beside each other, or ``--scatter``ed; homes appear behind own addresses
with ``--mirror``, as for vLLM's kernel. Each move is made twice: to where its pages lie already (``covered``,
as after a move has ended and the next has been covered ahead of) and to where it has to map them (``bare``).
Needs an NVIDIA GPU; figures are of this process alone.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device_time import driver_version
from moe_report import git_commit
from rich.console import Console
from rich.table import Table

from vamp_runtime.memory.agreement import SoleRank
from vamp_runtime.memory.boundary import Boundary, Move, MoveKind
from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.geometry import KVGeometry, SlabGeometry
from vamp_runtime.memory.kv_region import KVRegion
from vamp_runtime.memory.ledger import PageLedger
from vamp_runtime.memory.mover import Mover
from vamp_runtime.memory.slab import ExpertSlab

MIB = 1 << 20
MODES = ("inline", "beside", "beside_steps")
TAILS = ("covered", "bare")
FIGURES = ("total", "pages", "bubble", "ahead", "driver")


@dataclass(frozen=True)
class MoveTime:
    """One move, milliseconds: from request to publish, steps' excess, and of the driver's own calls.

    ``pages`` is of ``total`` what pages took, without waiting; ``calls`` has count and time by driver call.
    ``ahead`` is the excess of the steps beside which the next growth's pages were mapped, after this one.
    """

    mode: str
    kind: str
    tail: str
    total: float
    bubble: float
    ahead: float
    driver: float
    pages: float
    calls: dict[str, tuple[int, float]]


class Rank:
    """Slab, homes, region and boundary of one GPU, without weights."""

    def __init__(
        self,
        layers: int,
        experts: int,
        expert_mib: float,
        ratio: float,
        kv_mib: int,
        mirror: bool = False,
        scatter: bool = False,
    ) -> None:
        self.driver = CudaDriver(0, compute_stream=lambda: torch.cuda.current_stream().cuda_stream)
        part = (int(expert_mib * MIB),)
        self.geometry = SlabGeometry.plan(layers, experts, part, self.driver.granularity, ratio)
        page = self.geometry.page_bytes
        ledger = PageLedger(page)
        self.slab = ExpertSlab(self.driver, ledger, self.geometry, mirror=mirror)
        groups = range(self.geometry.movable_groups)
        for layer in range(layers if scatter else 0):
            self.slab.set_coldness(layer, [*groups[::2], *groups[1::2]])
        self.slab.refresh_homes(1 << 60)
        pages = kv_mib * MIB // page
        most = pages + self.geometry.max_level * self.geometry.pages_per_level
        kv = KVGeometry(1, page, most * page, most, page)
        self.region = KVRegion(self.driver, ledger, kv, pages=pages)
        self.boundary = Boundary(self.slab, self.region, SoleRank(), self.driver)
        self.calls: dict[str, list[float]] = {}
        api = self.driver._api

        def clocked(call: Callable[..., Any]) -> Callable[..., Any]:
            def inside(name: str, *args: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return call(name, *args)
                finally:
                    self.calls.setdefault(name, []).append((time.perf_counter() - begin) * 1e3)

            return inside

        api.plain, api.quick = clocked(api.plain), clocked(api.quick)  # type: ignore[method-assign]

    def next(self, kind: MoveKind, levels: int) -> Move:
        return Move(self.boundary.epoch + 1, kind, levels, self.slab.level, self.region.claimed)


def work(turns: int) -> None:
    for _ in range(turns):
        pass


class Steps:
    """An engine's loop in miniature: one graph replay ahead of the device, some Python in between."""

    def __init__(self, step_ms: float, python_ms: float) -> None:
        turns = 1_000_000
        begin_s = time.perf_counter()
        work(turns)
        # By count, not by the clock: what the thread of a move takes from this one must show.
        self.turns = round(turns * python_ms / 1e3 / (time.perf_counter() - begin_s))
        x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        for _ in range(3):
            torch.mm(x, x, out=y)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            torch.mm(x, x, out=y)
        end.record()
        end.synchronize()
        products = max(1, round(step_ms * 20 / begin.elapsed_time(end)))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(products):
                torch.mm(x, x, out=y)
        self.before: torch.cuda.Event | None = None

    def one(self, at_the_top: Callable[[], object]) -> float:
        """A step; its seconds."""
        begin = time.perf_counter()
        at_the_top()
        self.graph.replay()
        done = torch.cuda.Event()
        done.record()
        work(self.turns)
        if self.before is not None:
            self.before.synchronize()
        self.before = done
        return time.perf_counter() - begin


class CountingMover(Mover):
    """Keeps the driver calls of its move apart from those that cover ahead of the next."""

    def __init__(self, rank: Rank, *args: Any, **kwargs: Any) -> None:
        super().__init__(rank.boundary, *args, **kwargs)
        self.rank = rank
        self.calls: dict[str, tuple[int, float]] = {}

    def cover(self) -> None:
        self.calls = {name: (len(times), sum(times)) for name, times in self.rank.calls.items()}
        super().cover()


def measure(rank: Rank, mode: str, kind: MoveKind, tail: str, levels: int, steps: Steps | None) -> MoveTime:
    """One move in one mode, to where its pages lie already or not."""
    slots = torch.empty(rank.geometry.layers, rank.geometry.experts, dtype=torch.int32, device="cuda")

    def to_device() -> None:
        table = torch.frombuffer(bytearray().join(rank.slab.slot_table), dtype=torch.int32)
        slots.copy_(table.view_as(slots).pin_memory(), non_blocking=True)

    def end_process() -> None:
        raise SystemExit("a move failed")

    mover = CountingMover(rank, to_device, end_process, rank.driver.bind_thread, beside=mode != "inline")
    move = rank.next(kind, levels)
    bubble = ahead = 0.0
    if tail == "bare":
        rank.boundary.clear()
    else:
        for _ in rank.boundary.cover_ahead(levels):
            pass
        pages = levels * rank.slab.geometry.pages_per_level
        assert [*rank.region.covered][:pages] == [*range(rank.region.pages, rank.region.pages + pages)]
    rank.calls.clear()
    if steps is None:
        begin = time.perf_counter()
        mover.start(move)
        bubble = time.perf_counter() - begin
        outcome = mover.finish(wait=True)
    else:
        usual = statistics.median([steps.one(lambda: None) for _ in range(40)])
        taken = [steps.one(lambda: mover.start(move))]
        outcome = None
        while outcome is None:
            found: list[Any] = []
            taken.append(steps.one(lambda found=found: found.append(mover.finish())))
            outcome = found[0]
        covering = mover.covering
        taken += [steps.one(lambda: None) for _ in range(2)]
        bubble = sum(taken) - len(taken) * usual
        taken = []
        while mover.covering:
            taken.append(steps.one(lambda: None))
        taken += [steps.one(lambda: None) for _ in range(2 if covering else 0)]
        ahead = sum(taken) - len(taken) * usual
    assert outcome is not None and outcome.ok, outcome
    mover.close()  # the next one has a thread of its own
    # That one is waiting for the steps before.
    driver = sum(taken for name, (_, taken) in mover.calls.items() if name != "cuEventSynchronize")
    total, pages = outcome.seconds * 1e3, outcome.pages_seconds * 1e3
    excess = bubble * 1e3, ahead * 1e3
    return MoveTime(mode, kind.value, tail, total, *excess, driver, pages, mover.calls)


def rows(
    found: list[MoveTime], rank: Rank, levels: int, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One row per mode, direction and tail."""
    for mode, kind, tail in itertools.product(MODES, MoveKind, TAILS):
        some = [time for time in found if (time.mode, time.kind, time.tail) == (mode, kind.value, tail)]
        if not some:
            continue
        row: dict[str, Any] = {"operation": kind.value, "mode": mode, "tail": tail, "levels": levels}
        row["mib"] = levels * rank.geometry.pages_per_level * rank.geometry.page_bytes // MIB
        row["groups"] = levels * rank.geometry.layers
        row["step_ms"] = arguments.step_ms if mode == "beside_steps" else 0.0
        row["mirror"], row["scatter"] = arguments.mirror, arguments.scatter
        for name in FIGURES:
            values = sorted(getattr(time, name) for time in some)
            row[f"{name}_ms_median"] = statistics.median(values)
            row[f"{name}_ms_max"] = values[-1]
        if arguments.breakdown:
            row["calls"] = breakdown(some)
        yield row


def breakdown(some: list[MoveTime]) -> dict[str, dict[str, float]]:
    """Median count and milliseconds of each driver call in a move, the longest first."""
    found = {}
    for name in {name for move in some for name in move.calls}:
        counts, times = zip(*(move.calls.get(name, (0, 0.0)) for move in some), strict=True)
        found[name] = {"count": statistics.median(counts), "ms_median": statistics.median(times)}
    return dict(sorted(found.items(), key=lambda call: -call[1]["ms_median"]))


@contextmanager
def needs_gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        print("moves.py: no CUDA device; this benchmark needs an NVIDIA GPU", file=sys.stderr)
        sys.exit(2)
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--expert-mib", type=float, default=6.0)
    parser.add_argument("--max-offload-ratio", type=float, default=0.25)
    parser.add_argument("--kv-mib", type=int, default=8208)
    parser.add_argument("--levels", type=int, default=7, help="levels a move; 7 of the default are 1,008 MiB")
    parser.add_argument("--moves", type=int, default=6, help="moves of each kind, mode and tail")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--python-ms", type=float, default=2.0)
    parser.add_argument("--breakdown", action="store_true", help="time and number of each driver call")
    parser.add_argument(
        "--scatter", action="store_true", help="no group that leaves has a neighbour that does"
    )
    parser.add_argument("--mirror", action="store_true", help="homes behind the own addresses of groups out")
    parser.add_argument("--commit", default=git_commit())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with needs_gpu():
        rank = Rank(
            arguments.layers,
            arguments.experts,
            arguments.expert_mib,
            arguments.max_offload_ratio,
            arguments.kv_mib,
            arguments.mirror,
            arguments.scatter,
        )
    steps = Steps(arguments.step_ms, arguments.python_ms)
    found = []
    for mode, tail in itertools.product(MODES, TAILS):
        for _ in range(arguments.moves):
            for kind in (MoveKind.OFFLOAD, MoveKind.RESTORE):
                some = steps if mode == "beside_steps" else None
                found.append(measure(rank, mode, kind, tail, arguments.levels, some))
    rank.boundary.check_integrity()
    table = Table("operation", "mode", "tail", "MiB", "groups", *(f"{name} ms" for name in FIGURES))
    result = list(rows(found, rank, arguments.levels, arguments))
    for row in result:
        figures = [f"{row[f'{name}_ms_median']:.1f} (max {row[f'{name}_ms_max']:.1f})" for name in FIGURES]
        table.add_row(
            row["operation"], row["mode"], row["tail"], str(row["mib"]), str(row["groups"]), *figures
        )
    Console(width=150).print(table)
    for row in result if arguments.breakdown else ():
        print(f"{row['operation']}, {row['mode']}, {row['tail']}")
        for name, call in row["calls"].items():
            print(f"  {name:22} {call['count']:6.0f} calls {call['ms_median']:8.2f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(record(result, arguments.commit), indent=1) + "\n")


def record(result: list[dict[str, Any]], commit: str) -> dict[str, Any]:
    """What is written as JSON."""
    return {
        "name": "moves",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "driver": driver_version()},
        "notes": [
            "host clock; total: from request to publish",
            "bubble: what its steps took beyond as many median ones; without steps, until start returned",
            "ahead: the same of the steps after a move, while pages of the next growth were mapped",
            "pages: of total, without waiting for steps, other ranks and the step that publishes",
            "driver: inside the CUDA driver's calls, without the wait for the steps before",
        ],
        "rows": result,
    }


if __name__ == "__main__":
    main()
