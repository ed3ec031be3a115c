"""Experts on pages of host memory or of another GPU, at unchanged addresses, and what their links carry."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from device_time import timed
from moe_cases import Shape, Step, Weights, fill, record_views

from vamp_runtime.memory.driver import MemoryDriver, Tier
from vamp_runtime.memory.tensor import tensor_at

MIB = 1 << 20


@dataclass(frozen=True)
class Placement:
    """How many experts of every layer lie where; the others lie in the device's memory.

    Attributes:
        host: read from host memory.
        peer: read from the memory of another GPU.
        staged: at home in host memory, read from a slot of the device that holds a copy.
    """

    host: int = 0
    peer: int = 0
    staged: int = 0

    @property
    def moved(self) -> int:
        return self.host + self.peer + self.staged


@dataclass(frozen=True)
class Chosen:
    """Expert ids of a placement, the same in every layer, int64 on the device."""

    host: torch.Tensor
    peer: torch.Tensor
    staged: torch.Tensor


def choose(placement: Placement, experts: int, device: torch.device) -> Chosen:
    """Experts drawn at random, the same for the same numbers; ``ValueError`` where there are too few."""
    if placement.moved > experts:
        raise ValueError(f"{placement} moves {placement.moved} experts, the layer has {experts}")
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(7)).to(device)
    sizes = [placement.host, placement.peer, placement.staged, experts - placement.moved]
    return Chosen(*order.split(sizes)[:3])


def touching(step: Step, experts: int, wanted: torch.Tensor, seed: int) -> Step:
    """``step`` with experts renamed so that it hits as many of ``wanted`` as it hits experts at all.

    Rows per expert stay as drawn, so it is as much work as before.
    """
    hit = step.topk_ids.unique().long()
    missing = wanted[~torch.isin(wanted, hit)]
    free = hit[~torch.isin(hit, wanted)].cpu()
    free = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))].to(hit.device)
    count = min(len(missing), len(free))
    names = torch.arange(experts, device=hit.device)
    names[free[:count]], names[missing[:count]] = missing[:count], free[:count]
    return replace(step, topk_ids=names[step.topk_ids.long()].to(step.topk_ids.dtype))


class PagedWeights:
    """Weights of several layers in one reservation, every slot on a page of its own.

    A layer's slots are those of its experts, then ``staged`` that may hold copies, then ``staging`` for a
    call to bring experts into. Bytes that a slot has more than a record, up to whole pages, are not read.
    """

    def __init__(
        self,
        driver: MemoryDriver,
        shape: Shape,
        layers: int,
        device: torch.device,
        dtype: torch.dtype,
        staged: int,
        staging: int,
    ) -> None:
        self._driver, self._experts, self._staged = driver, shape.experts, staged
        self._run = shape.experts + staged + staging
        record = shape.weights * dtype.itemsize
        self._page = -(-record // driver.granularity) * driver.granularity
        slots = layers * self._run
        self._base = driver.reserve((slots + 1) * self._page)  # one more to fill a page before it is used
        self._handles: list[int] = []
        self._tiers = [Tier.HBM] * slots
        for slot in range(slots):
            self._handles.append(self._create(Tier.HBM))
            driver.map(self._address(slot), self._handles[slot])
        driver.set_access(self._base, slots * self._page)
        slab = tensor_at(self._base, (slots * self._page // dtype.itemsize,), dtype, device)
        w13, w2 = record_views(shape, slab, self._page // dtype.itemsize)
        ids = torch.arange(slots, dtype=torch.int32, device=device).split(self._run)
        own = [run[: shape.experts] for run in ids]
        rest = [run[shape.experts + staged :] for run in ids]
        resident = [torch.zeros(shape.experts, dtype=torch.bool, device=device) for _ in ids]
        self._weights = fill(shape, Weights(w13, w2, own, None, resident, rest))
        self._device = device

    def place(self, placement: Placement) -> Weights:
        """The weights with ``placement`` in force; earlier results are out of date."""
        if placement.staged > self._staged:
            raise ValueError(f"{placement} has more staged experts than slots, {self._staged}")
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        chosen = choose(placement, self._experts, self._device)
        tiers = dict.fromkeys(torch.cat([chosen.host, chosen.staged]).tolist(), Tier.HOST)
        tiers |= dict.fromkeys(chosen.peer.tolist(), Tier.PEER)
        slots = [own.clone() for own in self._weights.slots]
        masks = [torch.zeros(self._experts, dtype=torch.bool, device=self._device) for _ in slots]
        for layer, table in enumerate(slots):
            first = layer * self._run
            for expert in range(self._experts):
                self._move(first + expert, tiers.get(expert, Tier.HBM))
            for copy, expert in enumerate(chosen.staged.tolist(), first + self._experts):
                self._driver.copy(self._address(copy), self._address(first + expert), self._page)
                table[expert] = copy
            masks[layer][chosen.host] = True
        self._driver.synchronize()
        return replace(self._weights, slots=slots, host_experts=masks)

    def close(self) -> None:
        """Give all memory back; no tensor over it may be used any more."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        for slot, handle in enumerate(self._handles):
            self._driver.unmap(self._address(slot), self._page)
            self._driver.release(handle)
        self._driver.free(self._base, (len(self._handles) + 1) * self._page)

    def _move(self, slot: int, tier: Tier) -> None:
        if self._tiers[slot] is tier:
            return
        driver, page, address, spare = self._driver, self._page, self._address(slot), self._address(-1)
        handle = self._create(tier)
        driver.map(spare, handle)
        driver.set_access(spare, page)
        driver.copy(spare, address, page)
        driver.synchronize()
        driver.unmap(spare, page)
        driver.unmap(address, page)
        driver.release(self._handles[slot])
        driver.map(address, handle)
        driver.set_access(address, page)
        self._handles[slot], self._tiers[slot] = handle, tier

    def _create(self, tier: Tier) -> int:
        handle = self._driver.create(self._page, tier)
        if handle is None:
            raise MemoryError(f"no room for {self._page} bytes of {tier.value} memory: take fewer experts")
        return handle

    def _address(self, slot: int) -> int:
        """Of a slot; -1 is the one that belongs to no layer."""
        return self._base + (slot if slot >= 0 else len(self._tiers)) * self._page


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second from memory of one tier into the device's: by the copy engine, and by a kernel."""

    copied: float
    read: float


def link_rates(
    driver: MemoryDriver, tier: Tier, device: torch.device, nbytes: int = 256 * MIB, repetitions: int = 5
) -> LinkRates:
    """Measured on one page of ``nbytes``, far more than the caches hold."""
    base = driver.reserve(2 * nbytes)
    handles = [driver.create(nbytes, t) for t in (tier, Tier.HBM)]
    for offset, handle in zip((0, nbytes), handles, strict=True):
        if handle is None:
            raise MemoryError(f"no room for {nbytes} bytes to measure the link of {tier.value} memory")
        driver.map(base + offset, handle)
    driver.set_access(base, 2 * nbytes)
    source, target = (tensor_at(base + at, (nbytes // 2,), torch.bfloat16, device) for at in (0, nbytes))
    source.normal_()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        driver.copy(base + nbytes, base, nbytes)
        driver.synchronize()
        seconds.append(time.perf_counter() - start)
    read = timed([lambda: torch.neg(source, out=target)], repetitions)
    if device.type == "cuda":
        torch.cuda.synchronize()
    driver.unmap(base, 2 * nbytes)
    for handle in handles:
        driver.release(handle)
    driver.free(base, 2 * nbytes)
    return LinkRates(nbytes / sorted(seconds)[repetitions // 2], nbytes / read.median * 1e6)
