"""What travels between scheduler and workers, as one extra attribute on objects vLLM already sends.

``SchedulerOutput.vamp`` holds a ``StepCommand``: it is the only channel in the same order as the steps, on
every rank. ``ModelRunnerOutput.vamp`` holds a ``Report`` on the way back. Both classes are plain dataclasses
that are pickled whole and never rebuilt (``vllm/v1/core/sched/output.py``, ``vllm/v1/outputs.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vamp_integration.cold_reads import LevelCounts
from vamp_runtime.controller import Capacity, StepCommand
from vamp_runtime.memory.boundary import Outcome
from vamp_runtime.memory.copy_times import StagingSeconds
from vamp_runtime.policy.reselect import Candidate

ATTRIBUTE = "vamp"


@dataclass(frozen=True)
class MemoryFigures:
    """A rank's memory now, for the metrics; sums are since start.

    Attributes:
        pages: pages by kind of owner (``OwnerKind.value``), each of ``page_bytes``.
        home_bytes_copied: copied from HBM to home pages.
        host_bytes_read: read by the MoE layers from home pages on the host, estimated.
        staged_bytes: copied from there to staging slots ahead of layers.
        peer_bytes_read: the same, in a peer's HBM.
        home_pages: home pages by the tier they lie in (``Tier.value``).
        staging: time of copies ahead of layers.
    """

    pages: Mapping[str, int] = field(default_factory=dict)
    page_bytes: int = 0
    home_bytes_copied: int = 0
    host_bytes_read: int = 0
    staged_bytes: int = 0
    peer_bytes_read: int = 0
    home_pages: Mapping[str, int] = field(default_factory=dict)
    staging: StagingSeconds = field(default_factory=StagingSeconds)


@dataclass(frozen=True)
class Report:
    """A rank's news: its capacity with the first step, a move's outcome with the step that carried it, and
    its memory with both; swaps that its counters speak for, its memory, and what its steps would have read at
    every level, from time to time."""

    capacity: Capacity | None = None
    outcome: Outcome | None = None
    memory: MemoryFigures | None = None
    swaps: tuple[Candidate, ...] | None = None
    reads: LevelCounts | None = None


def put_command(output: SchedulerOutput, command: StepCommand | None) -> None:
    setattr(output, ATTRIBUTE, command)


def get_command(output: SchedulerOutput) -> StepCommand | None:
    return getattr(output, ATTRIBUTE, None)


def put_report(output: ModelRunnerOutput, report: Report) -> ModelRunnerOutput:
    """``output`` with the report on it; vLLM's shared empty output is copied, not marked."""
    if output is EMPTY_MODEL_RUNNER_OUTPUT:
        output = copy.copy(output)
    setattr(output, ATTRIBUTE, report)
    return output


def get_report(output: Any) -> Report | None:
    return getattr(output, ATTRIBUTE, None)
