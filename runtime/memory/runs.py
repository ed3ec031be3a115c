"""Runs of neighbours, which one driver call can serve together."""

from __future__ import annotations

from collections.abc import Iterable


def runs(places: Iterable[tuple[int, ...]], step: int = 1) -> list[list[tuple[int, ...]]]:
    """``places`` sorted and cut into runs in which every coordinate grows by ``step`` from each to the next.

    With one coordinate these are neighbours in address; with two, a copy's target and source, in both.
    """
    found: list[list[tuple[int, ...]]] = []
    for place in sorted(places):
        if found and place == tuple(each + step for each in found[-1][-1]):
            found[-1].append(place)
        else:
            found.append([place])
    return found
