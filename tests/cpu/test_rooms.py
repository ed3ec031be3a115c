"""Imports between the rooms point down only, wherever in a file they stand."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Room: its package, and the packages of other rooms that it may import.
ROOMS = {
    "profiles": ("vamp_profiles", frozenset[str]()),
    "vamp_kernels": ("vamp_kernels", frozenset[str]()),
    "runtime": ("vamp_runtime", frozenset({"vamp_kernels"})),
    "integration": ("vamp_integration", frozenset({"vamp_kernels", "vamp_profiles", "vamp_runtime"})),
}
# What no code of ours imports: the folder names, which are packages only by accident, and what lies above.
NEVER = frozenset({"profiles", "runtime", "integration", "bench", "tests", "support"})


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every import, also of those inside functions and type-checking blocks.

    Relative imports stay inside their room and are passed over.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield node.lineno, node.module.partition(".")[0]


def room_imports(room: str) -> Iterator[tuple[str, str]]:
    """Place (file and line) and top-level package of every import in a room."""
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, room
    for file in files:
        for line, package in imports(file.read_text(encoding="utf-8")):
            yield f"{file.relative_to(ROOT)}:{line}", package


def test_every_way_to_import_is_seen() -> None:
    source = """
import a.b as c, d
from e.f import g
from . import h
if TYPE_CHECKING:
    import i
def late():
    from j import k
"""
    assert [package for _, package in imports(source)] == ["a", "d", "e", "i", "j"]


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_down(room: str) -> None:
    own, below = ROOMS[room]
    packages = {package for package, _ in ROOMS.values()}
    forbidden = (packages - below - {own}) | NEVER
    assert [(place, package) for place, package in room_imports(room) if package in forbidden] == []


def test_the_runtime_knows_no_vllm() -> None:
    assert [place for place, package in room_imports("runtime") if package in ("vllm", "transformers")] == []


@pytest.mark.parametrize(("room", "extra"), [("vamp_kernels", {"torch", "triton"}), ("profiles", set[str]())])
def test_the_lowest_rooms_import_nothing_else(room: str, extra: set[str]) -> None:
    known = sys.stdlib_module_names | {ROOMS[room][0]} | extra
    assert [(place, package) for place, package in room_imports(room) if package not in known] == []
