"""What to say where a tier has no room for experts, homes or staging: how much there is, what would fit."""

from __future__ import annotations

import math

from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.ledger import Owner, OwnerKind, PageLedger


def no_room(geometry: SlabGeometry, ledger: PageLedger, tier: Tier, owner: Owner) -> str:
    """The setting to change and a value that would work, where ``tier`` has no page more for ``owner``."""
    if owner.kind is OwnerKind.STAGING:
        wanted = geometry.staging_groups * geometry.group_bytes
        fits = (ledger.count(OwnerKind.STAGING) * geometry.page_bytes) >> 20
        return f"staging_mib: staging needs {wanted} bytes of HBM and has no room; {fits} would work"
    if tier is Tier.HBM:
        wanted = geometry.groups * geometry.pages_per_level * geometry.page_bytes
        there = ledger.count(OwnerKind.EXPERT) * geometry.page_bytes
        times = math.ceil(wanted / max(there, 1))
        return (
            f"hbm: experts need {wanted} bytes and {there} could be had;"
            f" {times} times the tensor parallel size would work"
        )
    there = ledger.count(OwnerKind.HOME, tier) * geometry.page_bytes
    if tier is Tier.PEER:
        # Whole homes of every layer, so that planning with it gives as many.
        level_bytes = geometry.pages_per_level * geometry.page_bytes
        fitting = math.ceil(there // level_bytes * level_bytes / 2**30 * 10_000) / 10_000
        return (
            f"peer_hbm_gib: homes need {geometry.peer_home_bytes} bytes of the peer's HBM and {there}"
            f" could be had; {fitting:g} would work"
        )
    wanted = geometry.host_home_bytes
    level = geometry.peer_homes + there // (geometry.pages_per_level * geometry.page_bytes)
    # Rounded up at the fourth digit, so that planning with it gives this level again.
    ratio = math.ceil(level * geometry.group / geometry.experts * 10_000) / 10_000
    asked = geometry.home_slots * geometry.group / geometry.experts
    return (
        f"max_offload_ratio={asked:g}: homes need {wanted} bytes of host memory and {there} could be had;"
        f" {ratio:g} would work"
    )
