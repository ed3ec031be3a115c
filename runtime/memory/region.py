"""Staging a layer's host-backed experts ahead of the layer: what goes where, and the copies that bring it.

The paper's staging (arXiv 2609.13537) brings every offloaded expert of a layer into HBM before the layer
runs. Here the staging records are two buffers that take turns by layer: while a layer reads one, the copy
engine fills the other for the next. A buffer is free again when the layer that used it, two before, is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vamp_runtime.memory.copy_times import CopyTimes, StagingSeconds
from vamp_runtime.memory.driver import MemoryDriver
from vamp_runtime.memory.geometry import STAGING_BUFFERS
from vamp_runtime.memory.slab import ExpertSlab


@dataclass(frozen=True)
class SlotCopy:
    """Records from slot ``source`` on go to slot ``target`` on, in every part of a layer."""

    source: int
    target: int
    records: int


@dataclass(frozen=True)
class StagedRegion:
    """One layer's experts that are staged ahead of it.

    Attributes:
        slots: staging slot of each staged expert.
        copies: what brings them there; neighbours are one copy.
        left: host-backed experts for which the buffer has no room; they are read in place.
    """

    slots: dict[int, int]
    copies: tuple[SlotCopy, ...]
    left: int


def buffer_groups(slab: ExpertSlab) -> int:
    """Groups that one of the two buffers holds."""
    return slab.geometry.staging_groups // STAGING_BUFFERS


def plan_region(slab: ExpertSlab, layer: int) -> StagedRegion:
    """Stage the groups that ``layer`` reads from host memory, those that left last (the warmest) first."""
    geometry, out, on_host = slab.geometry, slab.out(layer), slab.hosted(layer)
    hosted = [group for group in reversed(out) if group in on_host]
    hosted += sorted(on_host.difference(out))
    homes = {group: slab.home_of(layer, group) for group in hosted[: buffer_groups(slab)]}
    staged = sorted((home, group) for group, home in homes.items() if home is not None)
    first = geometry.own_slots + layer % STAGING_BUFFERS * buffer_groups(slab) * geometry.group
    slots: dict[int, int] = {}
    copies: list[SlotCopy] = []
    for index, (home, group) in enumerate(staged):
        source, target = geometry.home_slot_base + home * geometry.group, first + index * geometry.group
        slots |= {expert: target + at for at, expert in enumerate(slab.experts_of(layer, group))}
        last = copies[-1] if copies else None
        if last is not None and last.source + last.records == source:
            copies[-1] = SlotCopy(last.source, last.target, last.records + geometry.group)
        else:
            copies.append(SlotCopy(source, target, geometry.group))
    return StagedRegion(slots, tuple(copies), (len(hosted) - len(staged)) * geometry.group)


class RegionCopies:
    """The copies of one step, on a stream beside the current one: layer by layer, in order.

    A step enters and leaves every layer; what it is given to read was copied in the same step. On a CPU a
    copy is done when it is queued.

    Attributes:
        nbytes: copied since start.
    """

    def __init__(self, slab: ExpertSlab, driver: MemoryDriver, device: torch.device) -> None:
        self._slab = slab
        self._driver = driver
        self._device = device
        self._layers = slab.geometry.layers
        self._copies: list[Sequence[SlotCopy]] = [()] * self._layers
        self._holds: list[int | None] = [None] * STAGING_BUFFERS
        self.nbytes = 0
        self._stream: torch.cuda.Stream | None = None
        self._arrived: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._arrived = [torch.cuda.Event() for _ in range(STAGING_BUFFERS)]  # type: ignore[no-untyped-call]
            self._times = CopyTimes(self._layers)

    @property
    def seconds(self) -> StagingSeconds:
        """Time of the copies since start; none on a CPU, where they are part of queueing them."""
        return StagingSeconds() if self._stream is None else self._times.seconds

    def follow(self, copies: Sequence[Sequence[SlotCopy]]) -> None:
        """Copy this from the next step on; ``copies[layer]`` are those of a layer."""
        assert len(copies) == self._layers
        self._copies = list(copies)
        self._holds = [None] * STAGING_BUFFERS

    def enter(self, layer: int) -> None:
        """Let what the current stream is given from now on read the layer's staging slots."""
        if layer == 0:
            if self._stream is not None:
                self._times.begin_step()
            for ahead in range(min(STAGING_BUFFERS, self._layers)):
                self._start(ahead)
        elif self._holds[layer % STAGING_BUFFERS] != layer:
            self._start(layer)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            self._times.waiting(layer, current, done=False)
            current.wait_event(self._arrived[layer % STAGING_BUFFERS])
            self._times.waiting(layer, current, done=True)

    def leave(self, layer: int) -> None:
        """The current stream was given all that reads the layer's slots: their buffer serves another."""
        if layer + STAGING_BUFFERS < self._layers:
            self._start(layer + STAGING_BUFFERS)

    def _start(self, layer: int) -> None:
        """Queue the layer's copies behind what the current stream holds now."""
        handle = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            handle = self._stream.cuda_stream
            self._times.copying(layer, self._stream, done=False)
        for copy in self._copies[layer]:
            for part, size in enumerate(self._slab.geometry.part_bytes):
                target, source = (
                    self._slab.address(layer, part, slot) for slot in (copy.target, copy.source)
                )
                self._driver.copy(target, source, copy.records * size, handle)
                self.nbytes += copy.records * size
        if self._stream is not None:
            self._times.copying(layer, self._stream, done=True)
            self._arrived[layer % STAGING_BUFFERS].record(self._stream)
        self._holds[layer % STAGING_BUFFERS] = layer
