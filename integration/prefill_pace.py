"""Hook: prefills are held for some steps, so that a pass over the experts on the host serves several prompts.

What: with experts out of HBM, while the time since the last prefill step is short
(``vamp_runtime.policy.pace``), vLLM is told to throttle prefills: it then admits no waiting request and puts
chunks of long prompts off, if others decode and the last prefill step left nobody waiting. Why: vLLM prefills
as soon as there is room, and each such step makes all that decode wait for a pass over all host experts. How:
the argument of ``schedule`` (``vllm/v1/core/sched/scheduler.py``) that balances prefills of data-parallel
ranks. It goes when vLLM can be told what a prefill step costs beside its tokens.

Where several prompts are to be prefilled, a long one leaves room for the others in the same step, by vLLM's
``long_prefill_token_threshold``, which is set for each step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vamp_integration.arbiter import Arbiter
from vamp_integration.measured import MOST_ORDERED
from vamp_runtime.memory.driver import Tier
from vamp_runtime.policy.pace import PrefillPace, longest_prompt

# Steps after which a prompt leaves no room for requests that had room and did not enter: they lack something
# else. A request that waits for a level enters sooner.
SHUT_AFTER = 4
# Chunks of hybrid models end at block boundaries, short of the budget.
FULL = 0.9
# A prompt of which a part is computed waits for so many others: each of its chunks is held anew.
BEGUN_WEIGHT = 2.0


class PacedPrefills:
    """One scheduler's pace; for the scheduler's thread only.

    Args:
        share: setting ``prefill_share``.
        bandwidth: bytes/s at which a kernel reads host memory.
    """

    def __init__(self, arbiter: Arbiter, share: float, bandwidth: float) -> None:
        self.pace = PrefillPace(share)
        self._arbiter, self._bandwidth = arbiter, bandwidth
        self._shut_steps = 0  # the last ones, which had room left and yet somebody was not admitted
        self._cut = False  # a prompt may be cut in the step under way to leave room for others

    def hold(self, scheduler: Any) -> bool:
        """Whether the step about to be scheduled should leave prefills out, if it has anything else to do."""
        read_s = self.read_s
        if not self.pace.paces(read_s):  # who waits need not be looked for
            return False
        now_s, now = time.monotonic(), time.time()
        begun, ready = len(_begun(scheduler)), list(islice(_ready(scheduler), MOST_ORDERED))
        since = self.pace.since(now_s)
        # Nobody is held for longer than since the last pass, whatever a clock or an earlier life says.
        waited = sum(min(max(0.0, now - request.arrival_time), since) for request in ready)
        waited += BEGUN_WEIGHT * begun * since if begun else 0.0
        decoding = len(scheduler.running) - begun
        return self.pace.hold(now_s, read_s, begun + len(ready), waited, decoding)

    @contextmanager
    def sharing(self, scheduler: Any) -> Iterator[None]:
        """While a step is scheduled, no prompt takes more of it than leaves room for the others."""
        config, most = scheduler.scheduler_config, 0
        given = config.long_prefill_token_threshold
        # A part of a prompt that must not be cut would never fit below the limit.
        cut = config.enable_chunked_prefill and not config.disable_chunked_mm_input
        if cut and self.pace.paces(self.read_s):
            begun, block = _begun(scheduler), scheduler.block_size
            enter = 0 if self._shut_steps >= SHUT_AFTER else min(_seats(scheduler), MOST_ORDERED)
            lengths = [request.num_tokens - request.num_computed_tokens for request in begun]
            lengths += [self._left(request, block) for request in islice(_ready(scheduler), enter)]
            decoding = len(scheduler.running) - len(begun)
            most = longest_prompt(scheduler.max_num_scheduled_tokens - decoding, lengths, block)
        self._cut = most > 0
        if most:
            config.long_prefill_token_threshold = min(most, given or most)
        try:
            yield
        finally:
            config.long_prefill_token_threshold = given

    def scheduled(self, output: SchedulerOutput, budget: int, left: int | None, least: int) -> None:
        """Note a step with prefills; one that a prompt fills alone could not have served more.

        Args:
            budget: most tokens of a step.
            left: requests that still wait; None where the step was held.
            least: tokens of the smallest chunk of a prompt.
        """
        tokens = output.total_num_scheduled_tokens
        room = budget - tokens >= least
        if left is not None:
            self._shut_steps = self._shut_steps + 1 if left > 0 and room else 0
        full = not self._cut and (tokens >= FULL * budget or not room)
        if len(output.num_scheduled_tokens) < tokens and not full:
            self.pace.prefilled(time.monotonic())

    def _left(self, request: Any, block_tokens: int) -> int:
        """Tokens to compute of a waiting request's prompt; a block where nobody knows what is cached."""
        tokens: int = request.num_tokens
        computed: int = request.num_computed_tokens
        there = None if self._arbiter.measured is None else self._arbiter.measured.there(request)
        if not computed and there is None:
            return min(tokens, block_tokens)
        return max(1, tokens - max(computed, there or 0))

    @property
    def read_s(self) -> float:
        """Seconds in which a rank reads every expert that it has out on the host."""
        controller, capacity = self._arbiter.controller, self._arbiter.controller.capacity
        if capacity is None or not controller.level:
            return 0.0
        memory = self._arbiter.journal.memory
        on_host = memory.home_pages.get(Tier.HOST.value, 0) * memory.page_bytes
        return min(controller.level * capacity.level_bytes, on_host) / self._bandwidth


def _ready(scheduler: Any) -> Iterator[Any]:
    """Requests that wait for nothing but a step: no grammar, no next input, no load from host memory."""
    loaded = scheduler.finished_recving_kv_req_ids
    for request in chain(scheduler.kv_holding_waiting, scheduler.waiting):
        if request.request_id in loaded or not scheduler._is_blocked_waiting_status(request.status):
            yield request


def _seats(scheduler: Any) -> int:
    """Requests that may still be admitted."""
    taken: int = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
    most: int = scheduler.max_num_active_reqs
    return max(0, most - taken)


def _begun(scheduler: Any) -> list[Any]:
    """Requests of which a part is still to be prefilled."""
    return [request for request in scheduler.running if request.is_prefill_chunk]
