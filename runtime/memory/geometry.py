"""How experts and KV blocks divide into pages: sizes and counts only, nothing that changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vamp_runtime.errors import ConfigError

MAX_GROUP_EXPERTS = 8
MAX_GROUP_BYTES = 64 << 20
# Staging records are so many buffers, which take turns by layer.
STAGING_BUFFERS = 2


@dataclass(frozen=True)
class SlabGeometry:
    """Expert records of one rank: every layer has the same number of experts of the same size.

    A layer's slots are, in order: a record per expert, padded to whole groups; ``staging_records``; and
    ``home_slots`` groups of home aliases. ``part_bytes`` holds the bytes of one expert in each part: one part
    where ``w13`` and ``w2`` are views of one record, two where the kernel wants a dense slab of each. All
    sizes in bytes. A page is one physical handle, the smallest thing that can move. At the highest level
    ``spare_homes`` of the homes are those of groups in HBM, which a swap may give for others. The first
    ``peer_homes`` home slots of a layer lie in the HBM of a peer, the rest on the host. The last
    ``padding_bytes`` of a record hold nothing, and count in ``part_bytes``.
    """

    layers: int
    experts: int
    part_bytes: tuple[int, ...]
    granularity: int
    group: int
    page_bytes: int
    home_slots: int
    staging_records: int
    spare_homes: int = 0
    padding_bytes: int = 0
    peer_homes: int = 0

    def __post_init__(self) -> None:
        assert self.page_bytes % self.granularity == 0
        assert all(self.group * part % self.page_bytes == 0 for part in self.part_bytes)
        assert 0 <= self.spare_homes <= self.home_slots <= self.movable_groups
        assert 0 <= self.peer_homes <= self.home_slots
        assert self.staging_records % self.group == 0

    @classmethod
    def plan(
        cls,
        layers: int,
        experts: int,
        part_bytes: tuple[int, ...],
        granularity: int,
        max_offload_ratio: float,
        staging_records: int = 0,
        spare_homes: int = 0,
        pad: bool = False,
        peer_bytes: int = 0,
        first_stays: bool = False,
    ) -> SlabGeometry:
        """The smallest group that is whole granules in every part, and the homes that the ratio asks for.

        ``staging_records`` is rounded up to whole groups. ``spare_homes`` come on top where there are levels
        at all and groups are left. ``pad`` a record of one part where a group would be too large. As many
        homes lie in the peer as ``peer_bytes`` hold, the same number of every layer. With
        ``first_stays`` the first group has no home: see ``ExpertSlab``.

        Raises:
            ConfigError: the ratio is outside 0..1, or a group would exceed 8 experts or 64 MiB.
        """
        if not 0 <= max_offload_ratio <= 1:
            raise ConfigError(
                f"max_offload_ratio={max_offload_ratio}: must lie between 0 and 1; 0.15 would work"
            )
        padding, group = 0, _group(part_bytes, granularity)
        if _too_large(part_bytes, group):
            if not pad or len(part_bytes) != 1:
                raise ConfigError(_group_too_large(part_bytes, granularity, group))
            group, record = _padded(part_bytes[0], granularity)
            padding, part_bytes = record - part_bytes[0], (record,)
        # A ratio is written in decimals: without the slack 0.29 of 100 experts would be 28.
        movable = experts // group - first_stays
        levels = min(math.floor(max_offload_ratio * experts / group + 1e-9), movable)
        spare = min(spare_homes, movable - levels) if levels else 0
        in_peer = peer_bytes // (layers * group * sum(part_bytes))
        return cls(
            layers=layers,
            experts=experts,
            part_bytes=part_bytes,
            granularity=granularity,
            group=group,
            page_bytes=math.gcd(*(group * part for part in part_bytes)),
            home_slots=levels + spare,
            staging_records=-(-staging_records // group) * group,
            spare_homes=spare,
            padding_bytes=padding,
            peer_homes=min(levels + spare, in_peer),
        )

    @property
    def parts(self) -> int:
        return len(self.part_bytes)

    @property
    def groups(self) -> int:
        """Groups per layer; the last may be short of experts but is whole pages."""
        return -(-self.experts // self.group)

    @property
    def movable_groups(self) -> int:
        """Whole groups per layer. A short last group never leaves HBM."""
        return self.experts // self.group

    @property
    def max_level(self) -> int:
        """Groups of every layer that may be out of HBM at once."""
        return self.home_slots - self.spare_homes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert over all parts."""
        return sum(self.part_bytes)

    @property
    def group_bytes(self) -> int:
        """Bytes of one group over all parts."""
        return self.group * self.expert_bytes

    @property
    def pages_per_group(self) -> int:
        return self.group_bytes // self.page_bytes

    @property
    def pages_per_level(self) -> int:
        return self.layers * self.pages_per_group

    @property
    def own_slots(self) -> int:
        """Slots of the experts' own records, padded to whole groups; staging records begin here."""
        return self.groups * self.group

    @property
    def staging_groups(self) -> int:
        """Groups of staging records, whose pages all layers share."""
        return self.staging_records // self.group

    @property
    def home_slot_base(self) -> int:
        """First slot of the home aliases."""
        return self.own_slots + self.staging_records

    @property
    def host_homes(self) -> int:
        """Home slots of a layer on the host."""
        return self.home_slots - self.peer_homes

    @property
    def host_slot_base(self) -> int:
        """First slot of the home aliases on the host; all slots from it on are on the host."""
        return self.home_slot_base + self.peer_homes * self.group

    @property
    def host_home_bytes(self) -> int:
        """Bytes of the home slots of all layers on the host."""
        return self.layers * self.host_homes * self.group_bytes

    @property
    def peer_home_bytes(self) -> int:
        """Bytes of the home slots of all layers in the peer."""
        return self.layers * self.peer_homes * self.group_bytes

    @property
    def extra_hbm_bytes(self) -> int:
        """HBM of this rank that holds no expert of its own: staging, padding of records and short groups."""
        short = self.layers * (self.own_slots - self.experts)
        padding = self.layers * self.experts * self.padding_bytes
        return (self.staging_records + short) * self.expert_bytes + padding

    @property
    def slots(self) -> int:
        """Slots of one layer."""
        return self.home_slot_base + self.home_slots * self.group

    def part_group_bytes(self, part: int) -> int:
        """Bytes of one group in ``part``."""
        return self.group * self.part_bytes[part]

    def reservation_bytes(self, part: int) -> int:
        """Bytes of addresses that one layer reserves for ``part``."""
        return self.slots * self.part_bytes[part]


def _group(part_bytes: tuple[int, ...], granularity: int) -> int:
    """Experts of the smallest run that is whole granules in every part."""
    return math.lcm(*(granularity // math.gcd(part, granularity) for part in part_bytes))


def _too_large(part_bytes: tuple[int, ...], group: int) -> bool:
    return group > MAX_GROUP_EXPERTS or group * sum(part_bytes) > MAX_GROUP_BYTES


def _padded(record: int, granularity: int) -> tuple[int, int]:
    """``(group, padded record)`` that waste the least; a group of one expert may be of any size."""
    groups = [1 << power for power in range(MAX_GROUP_EXPERTS.bit_length())]
    steps = [(group, granularity // group) for group in groups if granularity % group == 0]
    padded = [(group, -(-record // step) * step) for group, step in steps]
    fitting = [choice for choice in padded if choice[0] == 1 or not _too_large(choice[1:], choice[0])]
    return min(fitting, key=lambda choice: (choice[1], choice[0]))


def _group_too_large(part_bytes: tuple[int, ...], granularity: int, group: int) -> str:
    expert_bytes = sum(part_bytes)
    text = (
        f"granularity={granularity}: a group would be {group} experts of {expert_bytes} bytes,"
        f" over {MAX_GROUP_EXPERTS} experts or {MAX_GROUP_BYTES} bytes;"
    )
    if expert_bytes > MAX_GROUP_BYTES:
        return f"{text} {-(-expert_bytes // MAX_GROUP_BYTES)} times the tensor parallel size would work"
    experts = 1 << (min(MAX_GROUP_EXPERTS, MAX_GROUP_BYTES // expert_bytes).bit_length() - 1)
    run = experts * math.gcd(*part_bytes)
    return f"{text} a granularity of {run & -run} would work"


def check_order(order: Sequence[Sequence[int]], geometry: SlabGeometry) -> None:
    """Raise ``ConfigError`` unless ``order`` names every record of every layer once."""
    if len(order) != geometry.layers:
        raise ConfigError(f"record order: {len(order)} layers; {geometry.layers} would work")
    for layer, row in enumerate(order):
        if sorted(row) != list(range(geometry.experts)):
            raise ConfigError(
                f"record order, layer {layer}: {list(row)[:8]}... is no permutation;"
                f" every record from 0 to {geometry.experts - 1} once would work"
            )


@dataclass(frozen=True)
class KVGeometry:
    """KV blocks in one reservation: ``positions`` runs of blocks, each growing at its own tail.

    Block ``b`` of position ``p`` occupies ``block_stride`` bytes from ``p * position_stride + b *
    block_stride``. One position is vLLM's block-outermost layout (BLHNC); the CPU engine (LBHNC) has one for
    each layer position. Pages are dealt to the positions in turn: page ``k`` is page ``k // positions`` of
    position ``k % positions``. All sizes in bytes.

    Raises:
        ConfigError: a position is not whole pages, or too short for its blocks.
    """

    positions: int
    block_stride: int
    position_stride: int
    virtual_blocks: int
    page_bytes: int

    def __post_init__(self) -> None:
        needed = self.virtual_blocks * self.block_stride
        if self.position_stride % self.page_bytes:
            whole = math.lcm(self.block_stride, self.page_bytes)
            fit = -(-max(self.position_stride, needed) // whole) * whole
            raise ConfigError(
                f"position_stride={self.position_stride}: not whole pages of {self.page_bytes} bytes;"
                f" {fit} ({fit // self.block_stride} blocks) would work"
            )
        if needed > self.position_stride:
            raise ConfigError(
                f"virtual_blocks={self.virtual_blocks}: needs {needed} of {self.position_stride} bytes;"
                f" {self.position_stride // self.block_stride} would work"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of addresses to reserve."""
        return self.positions * self.position_stride

    @property
    def max_pages(self) -> int:
        """Pages that the reservation can hold."""
        return self.nbytes // self.page_bytes

    def blocks_for_pages(self, pages: int) -> int:
        """Blocks whose every byte is backed, in every position, by the first ``pages`` pages."""
        assert 0 <= pages <= self.max_pages
        return min(pages // self.positions * self.page_bytes // self.block_stride, self.virtual_blocks)

    def pages_for_blocks(self, blocks: int) -> int:
        """Fewest pages that back ``blocks`` blocks whole."""
        assert 0 <= blocks <= self.virtual_blocks
        return self.positions * -(-blocks * self.block_stride // self.page_bytes)

    def page_offset(self, page: int) -> int:
        """Byte offset of page ``page`` in the reservation."""
        index, position = divmod(page, self.positions)
        return position * self.position_stride + index * self.page_bytes

    def page_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Contiguous ``(offset, nbytes)`` that pages ``first`` to ``last - 1`` cover, one a position."""
        ranges = []
        for page in range(first, min(last, first + self.positions)):
            count = -(-(last - page) // self.positions)
            ranges.append((self.page_offset(page), count * self.page_bytes))
        return ranges
