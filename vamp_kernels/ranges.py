"""Named ranges around launches, for a profiler: nothing until a tool installs its own.

Here they are ``layer`` and, inside it, ``quantize`` (of the tokens, for fp8), ``route``, ``copy``, ``up``,
``down`` and ``combine``. With few tokens ``up`` and ``down`` do the rest as well. Ranges surround launches,
not kernels: a graph's replays have none. Users of the kernels have others for what they do around them,
``PHASES``; docs/profiling.md says around what each stands. A range begins and ends in one call on one thread,
and so what spans threads has none of its own: of a move beside steps only the phases do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

KERNELS = ("layer", "quantize", "route", "copy", "up", "down", "combine")
WALK = ("request", "redirect", "prepare", "agree", "publish", "abandon")
MOVE = ("move", *WALK, "slot table", "clear", "cover ahead")
PHASES = ("decide", "step", "obey", *MOVE, "order by use", "home refresh", "staging")
_installed: Callable[[str], AbstractContextManager[object]] | None = None


def install(named: Callable[[str], AbstractContextManager[object]] | None) -> None:
    """Let ``named(NAME)`` surround the launches of NAME from now on; ``None`` for nothing again."""
    global _installed
    _installed = named


def ranged(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: calls run inside the range ``name``, one of ``KERNELS`` or ``PHASES``."""
    assert name in KERNELS + PHASES

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            if _installed is None:
                return call(*args, **kwargs)
            with _installed(name):
                return call(*args, **kwargs)

        return inside

    return decorate
