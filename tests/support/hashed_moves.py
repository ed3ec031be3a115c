"""Many moves of every kind over a rig, and every byte of every expert after each."""

from __future__ import annotations

import torch

from support.boundary_suite import swaps
from support.rigs import Rig
from vamp_runtime.memory.tensor import tensor_at

PER_TURN = 4
ROOM = 1 << 30


def move_and_compare(rig: Rig, device: torch.device, moves: int) -> None:
    """After each move the device reads experts at their own addresses and where the slot table says."""
    geometry = rig.geometry

    def records(layer: int, part: int, first: int, count: int) -> torch.Tensor:
        sizes = (count, geometry.part_bytes[part])
        return tensor_at(rig.slab.address(layer, part, first), sizes, torch.uint8, device)

    places = [(layer, part) for layer in range(geometry.layers) for part in range(geometry.parts)]
    loaded = [records(*place, 0, geometry.experts).clone() for place in places]
    assert all(bool(part.any()) for part in loaded)
    for turn in range(moves // PER_TURN):
        groups = range(geometry.movable_groups)
        for layer in range(geometry.layers):
            rig.slab.set_coldness(layer, groups if turn % 2 else groups[::-1])
        rig.slab.refresh_homes(ROOM)
        for walk in (
            lambda: rig.boundary.offload(2),
            lambda: rig.boundary.swap(swaps(rig.boundary)),
            lambda: rig.boundary.restore(1),
            lambda: rig.boundary.restore(1),
        ):
            outcome = walk()
            assert outcome.ok, outcome.reason
            for (layer, part), expected in zip(places, loaded, strict=True):
                for expert, own in enumerate(expected):
                    if rig.slab.readable(layer, expert):
                        assert torch.equal(records(layer, part, expert, 1)[0], own)
                slots = torch.tensor(rig.slab.slot_table[layer], device=device)
                assert torch.equal(records(layer, part, 0, geometry.slots)[slots], expected)
        if turn % 25 == 0:
            rig.check()
