"""Reads the record order of a routing profile: which record of the slab each expert takes."""

from __future__ import annotations

import json
from pathlib import Path

from vamp_runtime.errors import ConfigError


def read_order(path: str, layers: int | None, experts: int | None) -> list[list[int]] | None:
    """The record order of a routing profile: JSON ``{"order": [[record of expert 0, ...] per layer]}``.

    ``None`` for an empty ``path``. ``layers`` or ``experts`` that are not known yet are not checked.
    Raises ``ConfigError`` naming file and field.
    """
    if not path:
        return None
    by_index = "leave it empty to place experts by index"
    try:
        profile = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        # ValueError: no UTF-8, or no JSON.
        raise ConfigError(
            f"record_order: {path}: cannot be read as a routing profile ({error}); {by_index}"
        ) from None
    order = profile.get("order") if isinstance(profile, dict) else None
    if not isinstance(order, list) or (layers is not None and len(order) != layers):
        wanted = "MoE layer" if layers is None else f"of {layers} MoE layers"
        raise ConfigError(
            f"record_order: {path}: order: has not one permutation for each {wanted}; {by_index}"
        )
    for index, row in enumerate(order):
        size = len(row) if experts is None and isinstance(row, list) else experts or 0
        if not _is_permutation(row, size):
            raise ConfigError(
                f"record_order: {path}: order[{index}] is not a permutation of 0..{size - 1}; {by_index}"
            )
    return order


def _is_permutation(row: object, experts: int) -> bool:
    if not isinstance(row, list) or any(type(record) is not int for record in row):
        return False
    return sorted(row) == list(range(experts))
