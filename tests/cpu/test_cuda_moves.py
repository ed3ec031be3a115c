"""Moves over simulated CUDA calls: how many, in which order, and what any refused one leaves behind."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
from support.boundary_suite import OFFLOAD, RESTORE, SWAP, move
from support.rigs import BARE, DENSE, PEER_SHAPES, RECORDS, SHAPES, Rig, Shape, build_rig
from support.simulated_cuda import SimulatedCuda, install

from vamp_runtime.errors import StateLost
from vamp_runtime.memory.boundary import MoveKind, Outcome
from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.move import Swap

CONTEXT = {"cuCtxPushCurrent", "cuCtxPopCurrent"}
LEVEL_BEFORE = {OFFLOAD: 1, RESTORE: 3, SWAP: 2}
LEVELS = {OFFLOAD: 2, RESTORE: 2, SWAP: 0}
FAULT_SHAPES = (*SHAPES, PEER_SHAPES[3])
kinds = pytest.mark.parametrize("kind", list(MoveKind), ids=lambda kind: kind.value)
shapes = pytest.mark.parametrize("shape", FAULT_SHAPES, ids=lambda shape: shape.name)
# As many layers as one rank's experts of a large model have, and groups of one page.
WIDE = Shape("wide", layers=24, experts=16, halves=(2,), ratio=0.5, positions=1, mirror=False)


@contextmanager
def open_rig(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, pages: int = 80
) -> Iterator[tuple[SimulatedCuda, Rig]]:
    cuda = install(monkeypatch, SimulatedCuda(pages))
    peer = 1 if shape.peer_homes else None
    yield cuda, build_rig(CudaDriver(0, peer), shape)
    cuda.host.close()


def get_ready(rig: Rig, kind: MoveKind) -> None:
    """Bring a fresh rig to where a move of ``kind`` begins, with bytes in its KV pages.

    Pages that a restore takes are zero, as they are again when it is undone. Whatever the move maps, other
    pages lie there.
    """
    rig.moved(rig.boundary.offload(2))
    pairs = [Swap(la, rig.slab.ready(la, 1)[0], rig.slab.out(la)[-1]) for la in range(rig.geometry.layers)]
    rig.moved(rig.boundary.swap(pairs))
    if kind is not SWAP:
        rig.moved(rig.boundary.offload(1) if kind is RESTORE else rig.boundary.restore(1))
    assert rig.slab.level == LEVEL_BEFORE[kind]
    rig.dirty_kv()
    if kind is RESTORE:
        geometry, base = rig.region.geometry, rig.region.address(0)
        for page in range(rig.region.pages - LEVELS[kind] * rig.geometry.pages_per_level, rig.region.pages):
            rig.driver.zero(base + geometry.page_offset(page), geometry.page_bytes)
        rig.driver.synchronize()


def physical(
    cuda: SimulatedCuda, but: Iterable[int]
) -> tuple[list[tuple[int, int, int, bool]], dict[int, bytes]]:
    """Every mapping, whether it is accessible, and a hash of each page that is, ``but`` for addresses."""
    space, left_out = cuda.host._space, set(but)
    found = [
        mapping
        for base, nbytes in space.reservations.items()
        for mapping in space.mappings(base, nbytes)
        if mapping.address not in left_out
    ]
    hashes = {
        each.handle: hashlib.blake2b(cuda.host.read(each.address, each.nbytes)).digest()
        for each in found
        if space.accessible(each)
    }
    return sorted((m.address, m.nbytes, m.handle, space.accessible(m)) for m in found), hashes


def calls(log: list[str]) -> Counter[str]:
    return Counter(name for name in log if name not in CONTEXT)


def strays_are_left(rig: Rig) -> None:
    """A call was refused after a strict move had been published: some addresses still lead somewhere."""
    assert rig.boundary.strict and rig.strays()
    rig.boundary.clear()
    assert not rig.strays()
    rig.check()


FAULTS = [(shape, False) for shape in FAULT_SHAPES] + [(shape, True) for shape in (DENSE, BARE)]


@kinds
@pytest.mark.parametrize(
    ("shape", "by_halves"), FAULTS, ids=lambda each: getattr(each, "name", "by halves" if each else "whole")
)
def test_one_refused_call_leaves_the_old_state_or_ends_loudly(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, kind: MoveKind, by_halves: bool
) -> None:
    """Every call of a move in turn. Only a thread's context that cannot be put back is beyond undoing."""
    k, done, refused = 1, False, set()
    while not done:
        with open_rig(monkeypatch, shape) as (cuda, rig):
            get_ready(rig, kind)
            before, books, strays = physical(cuda, rig.strays()), rig.snapshot(), rig.strays()
            cuda.by_halves, lost = by_halves, False
            while not (done or lost):
                cuda.refuse_at, cuda.refused = k, []
                k += 1
                try:
                    outcome = rig.boundary.run(move(rig.boundary, kind, LEVELS[kind]))
                except StateLost:
                    lost = True
                    assert cuda.refused == ["cuCtxPopCurrent"]
                else:
                    cuda.refuse_at = 0
                    done = not cuda.refused
                    assert outcome.ok or cuda.refused[0] in outcome.reason
                    assert outcome.ok or (physical(cuda, rig.strays()), rig.snapshot()) == (before, books)
                    rig.check()
                    if outcome.ok and not done:
                        refused.update(cuda.refused)
                        strays_are_left(rig)
                        break
                    assert rig.driver.usage() == cuda.host.usage()
                    if not done:  # or the next try would find what this one has mapped
                        rig.lay_strays(strays)
                refused.update(cuda.refused)
    wanted = {"cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuEventRecord", "cuEventSynchronize"}
    wanted |= CONTEXT | {"cuStreamSynchronize", "cuMemsetD8Async" if kind is OFFLOAD else "cuMemcpyAsync"}
    assert refused - {"cuEventCreate"} == wanted


@kinds
@shapes
def test_calls_refused_from_one_on_leave_the_old_state_or_end_loudly(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, kind: MoveKind
) -> None:
    k, outcomes = 1, set()
    while True:
        with open_rig(monkeypatch, shape) as (cuda, rig):
            get_ready(rig, kind)
            before, books = physical(cuda, rig.strays()), rig.snapshot()
            cuda.refuse_at, cuda.refuse_on = k, True
            k += 5
            try:
                ok = rig.boundary.run(move(rig.boundary, kind, LEVELS[kind])).ok
            except StateLost:
                outcomes.add("lost")
                continue
            outcomes.add("moved" if ok else "abandoned")
            cuda.refuse_at, cuda.refuse_on = 0, False
            assert ok or (physical(cuda, rig.strays()), rig.snapshot()) == (before, books)
            rig.check()
            if not cuda.refused:
                break
            if ok:
                strays_are_left(rig)
    assert outcomes == {"lost", "moved", "abandoned"}


@kinds
@shapes
def test_what_queued_kernels_read_waits_for_the_mark(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, kind: MoveKind
) -> None:
    """Before it pages are only mapped, and every address that could be read still shows what it did."""
    with open_rig(monkeypatch, shape) as (cuda, rig):
        get_ready(rig, kind)
        strays, seen = rig.strays(), []
        before, hashes = physical(cuda, strays)

        def kernels_end(event: object) -> tuple[()]:
            mappings, still = physical(cuda, strays)
            seen.append(set(before) <= set(mappings) and still == hashes)
            return ()

        cuda._cuEventSynchronize = kernels_end  # type: ignore[method-assign]
        cuda.log.clear()
        rig.boundary.request(move(rig.boundary, kind, LEVELS[kind]))
        rig.boundary.redirect()
        assert rig.boundary.prepare() and rig.boundary.agree() and seen == [True]
        at = cuda.log.index("cuEventSynchronize")
        ahead, after = calls(cuda.log[:at]), calls(cuda.log[at:])
        # What is unmapped lay where nobody reads.
        called = set(ahead) - {"cuEventCreate"}
        assert called <= {"cuEventRecord", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"}
        # With mirror a group's own addresses hold its home, which may be read until then.
        assert bool(ahead["cuMemMap"]) is (kind is OFFLOAD or not shape.mirror)
        assert bool(ahead["cuMemUnmap"]) is (bool(ahead["cuMemMap"]) and not shape.strict)
        assert bool(after["cuMemMap"]) is bool(after["cuMemUnmap"]) is shape.mirror
        cuda.log.clear()
        rig.moved(rig.boundary.publish())


def test_publishing_calls_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_rig(monkeypatch, RECORDS) as (cuda, rig):
        for kind, levels in ((OFFLOAD, 2), (SWAP, 0), (RESTORE, 2)):
            rig.boundary.request(move(rig.boundary, kind, levels))
            rig.boundary.redirect()
            assert rig.boundary.prepare() and rig.boundary.agree()
            cuda.log.clear()
            assert rig.boundary.publish().ok and not cuda.log


@pytest.mark.parametrize("shape", [RECORDS, BARE], ids=lambda shape: shape.name)
def test_copies_of_a_restore_run_while_pages_move(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    with open_rig(monkeypatch, shape) as (cuda, rig):
        rig.moved(rig.boundary.offload(2))
        cuda.log.clear()
        rig.boundary.restore(2)
        copying = cuda.log[cuda.log.index("cuMemcpyAsync") :]
        assert ("cuMemMap" in copying) is shape.mirror, "without, all pages are there before the mark passes"
        assert ("cuMemUnmap" in copying) is shape.mirror, "the KV tail stays mapped"
        assert copying.count("cuStreamSynchronize") == 1
        rig.check()


# Calls of a move of 8 levels of 24 layers: neighbours join, whatever lies apart takes a call each.
EVENTS = {"cuEventRecord": 1, "cuEventSynchronize": 1, "cuStreamSynchronize": 1}
COVERED = {"cuMemsetD8Async": 1, **EVENTS}
MAPPED = {"cuMemMap": 192, "cuMemSetAccess": 1}


def made(cuda: SimulatedCuda, outcome: Callable[[], Outcome]) -> Counter[str]:
    cuda.log.clear()
    assert outcome().ok
    return calls(cuda.log)


@pytest.mark.parametrize("scattered", [False, True], ids=["neighbours", "scattered"])
def test_calls_of_a_move(monkeypatch: pytest.MonkeyPatch, scattered: bool) -> None:
    """Mapping and unmapping every page took 192 maps, and up to as many unmaps, in either direction."""
    with open_rig(monkeypatch, WIDE, pages=420) as (cuda, rig):
        if scattered:
            for layer in range(WIDE.layers):
                rig.slab.set_coldness(layer, [*range(1, 16, 2), *range(0, 16, 2)])
            rig.slab.refresh_homes(1 << 40)
        rig.driver.wait(rig.driver.mark())
        back = EVENTS | {"cuMemcpyAsync": 192 if scattered else 24}
        assert made(cuda, lambda: rig.boundary.offload(8)) == MAPPED | COVERED
        assert made(cuda, lambda: rig.boundary.restore(8)) == back
        assert made(cuda, lambda: rig.boundary.offload(8)) == COVERED
        assert made(cuda, lambda: rig.boundary.restore(8)) == back
        rig.check()


def test_calls_of_covering_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of four pages maps and opens them; where others lie, they are unmapped together first."""
    with open_rig(monkeypatch, WIDE, pages=420) as (cuda, rig):
        rig.driver.wait(rig.driver.mark())
        for unmaps in (0, 1):
            cuda.log.clear()
            slices = rig.boundary.cover_ahead(8)
            for _ in range(48):
                assert next(slices) == 4
                each = Counter(cuMemMap=4, cuMemSetAccess=1, cuMemUnmap=unmaps)
                assert calls(cuda.log) == +each
                cuda.log.clear()
            assert not list(slices) and not cuda.log
            assert made(cuda, lambda: rig.boundary.offload(8)) == COVERED
            assert rig.boundary.restore(8).ok
            for layer in range(WIDE.layers):
                rig.slab.set_coldness(layer, [*range(1, 8), 9, 8, 0, *range(10, 16)])
            for _ in range(2):  # the homes of those that are back stay for one
                rig.slab.refresh_homes(1 << 40)
        rig.check()


def test_calls_of_a_strict_move(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_rig(monkeypatch, dataclasses.replace(WIDE, strict=True), pages=420) as (cuda, rig):
        rig.driver.wait(rig.driver.mark())
        for _ in range(2):
            assert list(rig.boundary.cover_ahead(8)) == []
            assert made(cuda, lambda: rig.boundary.offload(8)) == MAPPED | COVERED | {"cuMemUnmap": 24}
            back = MAPPED | EVENTS | {"cuMemSetAccess": 24, "cuMemcpyAsync": 24, "cuMemUnmap": 1}
            assert made(cuda, lambda: rig.boundary.restore(8)) == back


def test_calls_of_a_move_with_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    """Homes behind own addresses are a map for each page, and an access call for each run."""
    with open_rig(monkeypatch, dataclasses.replace(WIDE, mirror=True), pages=420) as (cuda, rig):
        rig.driver.wait(rig.driver.mark())
        own = {"cuMemMap": 192, "cuMemUnmap": 24, "cuMemSetAccess": 24}
        both = own | {"cuMemMap": 384, "cuMemSetAccess": 25}
        assert made(cuda, lambda: rig.boundary.offload(8)) == COVERED | both
        assert made(cuda, lambda: rig.boundary.restore(8)) == own | EVENTS | {"cuMemcpyAsync": 24}
        assert made(cuda, lambda: rig.boundary.offload(8)) == COVERED | own
        rig.check()
