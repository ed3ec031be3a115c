"""Staged experts: copied from host memory while other tiles are read in place, and multiplied once there.

An expert of more rows than a tile has would be read from host memory once for each of its tiles, and one
read in place beside tall tiles keeps processors waiting. Both are copied to a staging slot instead, on a
stream of the workspace, ``w13`` before ``w2``; a second stream waits for either before the product that reads
it, and the caller's stream waits for that one at the end. No kernel polls memory, and none is launched early,
as a dependent of the one before it, across a wait for another stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from vamp_kernels.gather import gather
from vamp_kernels.tiles import Routing
from vamp_kernels.workspace import Workspace


def run_staged(
    w13: torch.Tensor,
    w2: torch.Tensor,
    routing: Routing,
    gate_up: Callable[[], None],
    down: Callable[[], None],
    workspace: Workspace,
) -> None:
    """Queue the copies of ``routing``, and ``gate_up`` and ``down``, the products of the staged tiles.

    They run behind what the current stream holds now and beside what it is given next, until ``join``.
    """
    assert routing.copies is not None and routing.copy_count is not None
    copying, computing = workspace.side_streams()
    _follow(copying, _current(workspace))
    with _on(copying):
        gather(w13, routing.copies, routing.copy_count)
    _follow(computing, copying)
    with _on(copying):
        gather(w2, routing.copies, routing.copy_count)
    with _on(computing):
        gate_up()
    _follow(computing, copying)
    with _on(computing):
        down()


def join(workspace: Workspace) -> None:
    """Let the current stream wait for what ``run_staged`` queued."""
    _follow(_current(workspace), workspace.side_streams()[1])


def _current(workspace: Workspace) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(workspace.device) if workspace.device.type == "cuda" else None


def _follow(stream: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
    """Let ``stream`` wait for what ``other`` holds now; without streams, on a CPU, calls run in order."""
    if stream is not None and other is not None:
        stream.wait_stream(other)


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
