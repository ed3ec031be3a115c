"""Names for a profiler: where they stand in moves beside steps, that each is used, and when there are any."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.boundary_suite import EVERY_CALL, OFFLOAD, RESTORE, SWAP, move
from support.faulty import FaultyDriver
from support.rigs import BARE, STRICT, Rig, Shape, build_rig

from vamp_integration import profiler_ranges
from vamp_integration.settings import VampSettings
from vamp_kernels import ranges
from vamp_runtime.memory.boundary import Move
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.mover import Mover

ROOT = Path(__file__).parents[2]


class Recorder:
    """What a tool would see: the ranges that were entered, each with the names around it on its thread."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.away: set[str] = set()
        self._here = threading.get_ident()
        self._open: dict[int, list[str]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        around = self._open.setdefault(threading.get_ident(), [])
        around.append(name)
        self.seen.append("/".join(around))
        if threading.get_ident() != self._here:
            self.away.add(name)
        yield
        assert around.pop() == name

    def take(self) -> list[str]:
        """What was entered since the last call; nothing is open."""
        seen, self.seen = self.seen, []
        assert not any(self._open.values())
        return seen


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    found = Recorder()
    ranges.install(found)
    yield found
    ranges.install(None)


@contextmanager
def open_mover(shape: Shape, beside: bool = True) -> Iterator[tuple[Rig, Callable[[Move], bool]]]:
    """A rig, and a function that makes a move as a worker does; whether it was published."""
    inner = HostDriver(4096)
    driver = FaultyDriver(inner, calls=())
    rig = build_rig(driver, shape)
    mover = Mover(rig.boundary, lambda: None, lambda: pytest.fail("the state was lost"), beside=beside)

    def make(asked: Move) -> bool:
        mover.start(asked)
        outcome = mover.finish(wait=True)
        mover.rest()
        assert outcome is not None
        return outcome.ok

    yield rig, make
    mover.close()
    rig.close()
    inner.close()


BEFORE, BESIDE = ["request", "redirect"], ["prepare", "agree"]
WALKS = {
    OFFLOAD: [*BEFORE, "slot table", *BESIDE, "publish"],
    RESTORE: [*BEFORE, *BESIDE, "publish", "slot table"],
    SWAP: [*BEFORE, "slot table", *BESIDE, "publish", "slot table"],
}


@pytest.mark.parametrize("shape", [BARE, STRICT], ids=["lazy", "strict"])
def test_every_phase_of_a_move_beside_steps_has_its_range(recorder: Recorder, shape: Shape) -> None:
    with open_mover(shape) as (rig, make):
        recorder.take()
        for kind, levels in ((OFFLOAD, 2), (SWAP, 0), (RESTORE, 1)):
            assert make(move(rig.boundary, kind, levels, rig.region.claimed))
            seen = recorder.take()
            assert [name for name in seen if name not in ("cover ahead", "clear")] == WALKS[kind]
            after = seen[len(WALKS[kind]) :]
            assert set(after) == ({"cover ahead", "clear"} if shape.strict else {"cover ahead"})
        assert recorder.away == {*BESIDE, *after}, "on the mover's thread"


def test_a_move_that_fails_is_abandoned_in_its_range(recorder: Recorder) -> None:
    with open_mover(BARE) as (rig, make):
        recorder.take()
        rig.driver.counted, rig.driver.fail_at = EVERY_CALL, 1  # type: ignore[attr-defined]
        assert not make(move(rig.boundary, OFFLOAD, 1))
        walk = [name for name in recorder.take() if name != "cover ahead"]
        assert walk == [*BEFORE, "slot table", *BESIDE, "abandon", "slot table"]


def test_between_steps_the_phases_lie_in_the_move(recorder: Recorder) -> None:
    with open_mover(BARE, beside=False) as (rig, make):
        recorder.take()
        assert make(move(rig.boundary, OFFLOAD, 1))
        phases = [f"move/{name}" for name in (*BEFORE, *BESIDE, "publish")]
        assert recorder.take() == ["move", *phases, "slot table"] and not recorder.away


def test_every_name_is_used_and_described() -> None:
    used = set()
    for room in ("vamp_kernels", "runtime", "integration"):
        for file in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ranged":
                    used.add(ast.literal_eval(node.args[0]))
    names = [*ranges.KERNELS, *ranges.PHASES]
    assert used == set(names) and len(set(names)) == len(names)
    described = (ROOT / "docs" / "profiling.md").read_text()
    assert [name for name in names if f"`{name}`" not in described] == []


def test_no_other_name_can_be_used() -> None:
    with pytest.raises(AssertionError):
        ranges.ranged("mvoe")


def test_nothing_is_installed_by_default() -> None:
    code = "from vamp_kernels import ranges; import vamp_integration.moe_kernel; print(ranges._installed)"
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["None"]


def test_an_engine_without_nvtx_starts_without_the_ranges_of_one_before(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Recorder()
    monkeypatch.setattr(torch.cuda.nvtx, "range", ours)
    step = ranges.ranged("step")(lambda: None)
    profiler_ranges.follow(VampSettings(nvtx=True))
    step()
    profiler_ranges.follow(VampSettings())
    step()
    assert ours.take() == ["step"] and recorder.take() == []
