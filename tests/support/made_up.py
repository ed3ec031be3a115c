"""A made-up model in the place of vLLM's GPU runner, on a device that runs kernels as late as it may.

It writes what it computes to the blocks of its requests, through the addresses of the KV region, and checks
in every step what earlier ones have left there. Kernels run when an output is asked for, or a mark is waited
for.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from support.gpu_worker import StandIn, kv_groups, small_slab
from support.scenarios import VOCABULARY
from vamp_integration.commands import get_command
from vamp_runtime.controller import StepCommand
from vamp_runtime.errors import DriverError
from vamp_runtime.memory.driver import MemoryDriver

BLOCK = 16
WORD = 8  # bytes that a position, or a state, leaves in a block; once at each end of it


class Device:
    """A queue of kernels. Whoever waits for one runs them, up to that."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.launched = self.done = 0
        self._queue: deque[Sequence[Callable[[], None]]] = deque()

    def launch(self, kernels: Sequence[Callable[[], None]]) -> int:
        """Queue a step's; its place in the queue."""
        with self.lock:
            self._queue.append(kernels)
            self.launched += 1
            return self.launched

    def run(self, until: int) -> None:
        with self.lock:
            while self.done < until:
                for kernel in self._queue.popleft():
                    kernel()
                self.done += 1


class LateDriver:
    """A driver whose marks are places in the device's queue; one call at a time, kernels among them."""

    def __init__(self, inner: MemoryDriver, device: Device) -> None:
        self._inner, self._device = inner, device

    def mark(self) -> object:
        return self._device.launched

    def passed(self, mark: Any) -> bool:
        return self._device.done >= int(mark)

    def wait(self, mark: Any) -> None:
        self._device.run(mark)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            with self._device.lock:
                return found(*args, **named)

        return call


@dataclass
class Served:
    """A request as the device knows it: tokens, rows of block ids, and a digest of all tokens up to each."""

    tokens: list[int]
    blocks: list[list[int]]
    digests: list[bytes] = field(default_factory=list)

    def digest(self, position: int) -> bytes:
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else b""
            token = self.tokens[len(self.digests)].to_bytes(4, "little")
            self.digests.append(hashlib.blake2b(before + token, digest_size=WORD).digest())
        return self.digests[position]

    def sample(self) -> int:
        token = int.from_bytes(self.digest(len(self.tokens) - 1), "little") % VOCABULARY
        self.tokens.append(token)
        return token


def used_by(request: Served, start: int, end: int) -> set[int]:
    """Ids that a step over tokens ``start`` to ``end`` uses; rows keep others, which it has given back."""
    *states, attention = request.blocks
    columns = {(end - 1) // BLOCK, (max(start, 1) - 1) // BLOCK}
    return {*attention[: -(-end // BLOCK)], *(row[column] for row in states for column in columns)}


@dataclass(frozen=True)
class Step:
    """The command that a step brought, and the ids that its kernels use, by request."""

    command: StepCommand | None
    used: dict[str, set[int]]

    @property
    def claimed(self) -> int | None:
        return None if self.command is None else self.command.claimed_blocks

    @property
    def highest(self) -> int:
        return max(map(max, self.used.values()), default=0)


class LateOutput(AsyncModelRunnerOutput):
    """Runs the step's kernels when asked for, after what is ``under_way`` then, which may run them itself."""

    def __init__(
        self,
        device: Device,
        until: int,
        sampled: dict[str, list[int]],
        under_way: Callable[[], Future[bool] | None],
    ) -> None:
        self._device, self._until, self._sampled, self._under_way = device, until, sampled, under_way

    def get_output(self) -> ModelRunnerOutput:
        if (move := self._under_way()) is not None:
            wait([move])
        self._device.run(self._until)
        names = list(self._sampled)
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [*self._sampled.values()])


class MadeUpModel(StandIn, Worker):
    """What runs under VAMP's worker. What goes wrong is noted, not raised: the mover's thread may be here."""

    def __init__(self, config: Any, device: Device, driver: MemoryDriver) -> None:
        given = config.cache_config.kv_cache_memory_bytes
        super().__init__(small_slab(driver), config, kv_groups(), given)
        self.device, self.driver = device, driver
        self.sequences: dict[str, Served] = {}
        self.steps: list[Step] = []
        self.wrong: list[str] = []
        self._output: LateOutput | None = None

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["BLHNC"]

    def compile_or_warm_up_model(self) -> Any:
        return CompilationTimes(0.0, 0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        places = self._follow(scheduler_output)
        work = {
            name: (self.sequences[name], places[name], places[name] + tokens)
            for name, tokens in scheduler_output.num_scheduled_tokens.items()
        }
        used = {name: used_by(*part) for name, part in work.items()}
        self.steps.append(Step(get_command(scheduler_output), used))
        if not work:
            return EMPTY_MODEL_RUNNER_OUTPUT
        sampled: dict[str, list[int]] = {name: [] for name in work}
        where = f"step {len(self.steps) - 1}"
        kernels = [self._kernel(f"{where}, {name}", *part, sampled[name]) for name, part in work.items()]
        number = self.device.launch(kernels)
        self._output = LateOutput(self.device, number, sampled, lambda: self._under_way(number))
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._output

    def _under_way(self, step: int) -> Future[bool] | None:
        """In every other step the move, if there is one: it comes as far as it can before the kernels run."""
        move: Future[bool] | None = self._mover._agreed if step % 2 else None  # type: ignore[attr-defined]
        return move

    def _follow(self, output: SchedulerOutput) -> dict[str, int]:
        """Take over what a step says of requests, as vLLM's runner; how far each that it schedules is."""
        for name in {*output.finished_req_ids, *(output.preempted_req_ids or ())}:
            self.sequences.pop(name, None)
        places = {}
        for new in output.scheduled_new_reqs:
            assert new.prefill_token_ids is not None, "made up after the second model runner"
            self.sequences[new.req_id] = Served([*new.prefill_token_ids], [[*ids] for ids in new.block_ids])
            places[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for name, new_ids, computed in rows:
            for row, ids in zip(self.sequences[name].blocks, new_ids or ((), (), ()), strict=True):
                row.extend(ids)
            places[name] = computed
        return places

    def _kernel(
        self, where: str, request: Served, start: int, end: int, sampled: list[int]
    ) -> Callable[[], None]:
        """Check what earlier steps have left in the request's blocks, add to it, sample after the last."""
        *states, attention = ([*row] for row in request.blocks)

        def run() -> None:
            try:
                for row in states:
                    if start:
                        self._expect(where, row[(start - 1) // BLOCK], 0, request.digest(start - 1))
                    self._leave(row[(end - 1) // BLOCK], 0, request.digest(end - 1))
                for position in range(start):
                    block, slot = attention[position // BLOCK], position % BLOCK
                    self._expect(where, block, slot, request.digest(position))
                for position in range(start, end):
                    self._leave(attention[position // BLOCK], position % BLOCK, request.digest(position))
            except DriverError as error:
                self.wrong.append(f"{where}: {error}")
            if end == len(request.tokens):
                sampled.append(request.sample())

        return run

    def _places(self, block: int, slot: int) -> tuple[int, int]:
        """Two, since a block may lie on two pages."""
        region = self._boundary.region  # type: ignore[attr-defined]
        first: int = region.address(block) + slot * WORD
        return first, first + region.geometry.block_stride - BLOCK * WORD

    def _expect(self, where: str, block: int, slot: int, digest: bytes) -> None:
        if any(self.driver.read(at, WORD) != digest for at in self._places(block, slot)):
            self.wrong.append(f"{where}: block {block} holds something else than was written there")

    def _leave(self, block: int, slot: int, digest: bytes) -> None:
        for at in self._places(block, slot):
            self.driver.write(at, digest)
