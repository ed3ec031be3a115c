"""Prefills that are held back beside decoding, in a real engine; and the hook that vLLM has for it."""

from __future__ import annotations

import inspect
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine import run_scenario

from vamp_runtime.policy.pace import PATIENCE

pytestmark = pytest.mark.vllm


def test_vllm_can_still_be_told_to_throttle_prefills() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    assert "throttle_prefills" in inspect.signature(Scheduler.schedule).parameters
    assert "defer_prefills and request.is_prefill_chunk" in source and "prefill_capacity_bound" in source


def test_prompts_wait_for_a_pass_of_their_own_while_others_decode(tiny_model: Path) -> None:
    read_s, share = 0.4, 0.5
    run = run_scenario("paced", tiny_model, read_s=read_s, share=share, max_tokens=300)
    free = run_scenario("paced", tiny_model, read_s=read_s, share=1.0, max_tokens=300)
    assert run["read_s"] == free["read_s"] == pytest.approx(read_s)
    for found in (run, free):
        begun = [at for at, prefills, _ in found["steps"] if prefills]
        assert len(begun) == 2 and [len(tokens) for tokens in found["tokens"].values()] == [300, 300]
        between = [prefills for at, prefills, _ in found["steps"] if begun[0] < at < begun[1]]
        if found is run:
            assert begun[1] - begun[0] >= read_s / share and len(between) + 1 >= run["held"] > 5
        else:
            assert found["held"] == 0 and not between


def test_a_prompt_that_holds_nobody_up_does_not_wait(tiny_model: Path) -> None:
    """The first request has ended when the second comes: nothing else could be done meanwhile."""
    run = run_scenario("paced", tiny_model, read_s=5.0, share=0.1, max_tokens=1)
    assert len(run["tokens"]) == 2
    (first, *_), (second, *_) = run["steps"]
    assert second - first < 5.0


def paced_prefills(level: int = 5, share: float = 0.5) -> Any:
    from vamp_integration.prefill_pace import PacedPrefills

    home = SimpleNamespace(home_pages={"host": 100}, page_bytes=1 << 20)
    capacity = SimpleNamespace(level_bytes=10 << 20)
    arbiter: Any = SimpleNamespace(
        controller=SimpleNamespace(level=level, capacity=capacity),
        journal=SimpleNamespace(memory=home),
        measured=None,
    )
    return PacedPrefills(arbiter, share=share, bandwidth=1 << 20)


def a_request(begun: bool = False, status: str = "WAITING", tokens: int = 3000) -> Any:
    from vllm.v1.request import RequestStatus

    values = {"num_tokens": tokens, "num_computed_tokens": 0, "arrival_time": time.time()}
    return SimpleNamespace(
        is_prefill_chunk=begun, request_id=status, status=getattr(RequestStatus, status), **values
    )


def queues(waiting: list[Any], running: list[Any], most_running: int = 8) -> dict[str, Any]:
    """What of vLLM's scheduler says who may enter."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return {
        "waiting": waiting,
        "running": running,
        "kv_holding_waiting": [],
        "finished_recving_kv_req_ids": set(),
        "_is_blocked_waiting_status": Scheduler._is_blocked_waiting_status,
        "max_num_active_reqs": most_running,
        "num_waiting_for_streaming_input": 0,
    }


def scheduler_of(begun: bool, waiting: int, most_running: int = 8, given: int = 0) -> Any:
    """Two requests run, of which one may still be ``begun``, and some wait."""
    config = SimpleNamespace(
        long_prefill_token_threshold=given, enable_chunked_prefill=True, disable_chunked_mm_input=False
    )
    return SimpleNamespace(
        scheduler_config=config,
        **queues([a_request() for _ in range(waiting)], [a_request(begun), a_request()], most_running),
        max_num_scheduled_tokens=1100,
        block_size=256,
    )


@pytest.mark.parametrize(
    ("level", "share", "begun", "given", "during"),
    [
        (5, 0.5, True, 0, 768),
        (5, 0.5, True, 100, 100),
        (5, 0.5, True, 2000, 768),
        (5, 0.5, False, 0, 0),
        (0, 0.5, True, 0, 0),
        (5, 1.0, True, 0, 0),
    ],
    ids=["two prompts", "a lower limit", "a higher one", "one prompt", "level 0", "not paced"],
)
def test_two_prompts_share_a_step(level: int, share: float, begun: bool, given: int, during: int) -> None:
    """Whatever happens while the step is scheduled, vLLM's own limit is back after it."""
    scheduler = scheduler_of(begun, waiting=1, given=given)
    config = scheduler.scheduler_config
    with pytest.raises(KeyError), paced_prefills(level, share).sharing(scheduler):
        assert config.long_prefill_token_threshold == during
        raise KeyError
    assert config.long_prefill_token_threshold == given


@pytest.mark.parametrize(
    ("most_running", "tokens", "allowed"),
    [(8, 1100, True), (2, 1100, False), (8, 300, False)],
    ids=["there is room", "as many run as may", "the last steps had room and admitted nobody"],
)
def test_no_room_is_left_for_who_cannot_enter(most_running: int, tokens: int, allowed: bool) -> None:
    from vamp_integration.prefill_pace import SHUT_AFTER

    scheduler = scheduler_of(begun=True, waiting=2, most_running=most_running)
    config = scheduler.scheduler_config
    paced = paced_prefills()
    output: Any = SimpleNamespace(
        total_num_scheduled_tokens=tokens, num_scheduled_tokens={"a": tokens - 1, "b": 1}
    )
    for step in range(SHUT_AFTER):
        with paced.sharing(scheduler):
            assert bool(config.long_prefill_token_threshold) is (most_running > 2), f"after {step} steps"
        paced.scheduled(output, budget=1100, left=2, least=256)
    with paced.sharing(scheduler):
        assert bool(config.long_prefill_token_threshold) is allowed


def test_what_is_cached_of_a_waiting_prompt_needs_no_room() -> None:
    scheduler, paced = scheduler_of(begun=True, waiting=3), paced_prefills()
    config = scheduler.scheduler_config
    paced._arbiter.measured = SimpleNamespace(there=lambda request: 2900)
    with paced.sharing(scheduler):
        assert config.long_prefill_token_threshold == 768, "1100 without three times 100, in blocks of 256"
    paced._arbiter.measured = SimpleNamespace(there=lambda request: 0)
    with paced.sharing(scheduler):
        assert config.long_prefill_token_threshold == 256, "four long ones"


def test_who_waits_for_long_is_let_in() -> None:
    """Together as long as the reads stop who decodes, times their number, ``PATIENCE`` times over."""
    paced, scheduler = paced_prefills(share=0.01), scheduler_of(begun=False, waiting=2)
    bound = PATIENCE * paced.read_s * 2**2 / 2
    paced.pace.prefilled(time.monotonic() - 2 * bound)
    assert paced.hold(scheduler)
    for request in scheduler.waiting:
        request.arrival_time -= bound
    assert not paced.hold(scheduler)
    paced.pace.prefilled(time.monotonic())
    assert paced.hold(scheduler), "a pass has just been; what came before it is no wait for this one"


def test_begun_prompts_count_more_than_others() -> None:
    from vamp_integration.prefill_pace import BEGUN_WEIGHT

    paced, scheduler = paced_prefills(share=0.01), scheduler_of(begun=True, waiting=0)
    bound = PATIENCE * paced.read_s * 1 / BEGUN_WEIGHT
    paced.pace.prefilled(time.monotonic() - 0.9 * bound)
    assert paced.hold(scheduler)
    paced.pace.prefilled(time.monotonic() - 1.1 * bound)
    assert not paced.hold(scheduler)


@pytest.mark.parametrize("status", ["WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING_FOR_REMOTE_KVS"])
def test_who_waits_for_something_else_counts_for_nothing(status: str) -> None:
    paced, scheduler = paced_prefills(share=0.01), scheduler_of(begun=True, waiting=0)
    blocked = a_request(status=status)
    blocked.arrival_time -= 1e6
    scheduler.waiting.append(blocked)
    paced.pace.prefilled(time.monotonic())
    assert paced.hold(scheduler)
    with paced.sharing(scheduler):
        assert scheduler.scheduler_config.long_prefill_token_threshold == 0


def test_who_has_loaded_from_host_memory_is_held_and_given_room() -> None:
    paced, scheduler = paced_prefills(share=0.01), scheduler_of(begun=False, waiting=0)
    loaded = a_request(status="WAITING_FOR_REMOTE_KVS")
    loaded.num_computed_tokens = 2900
    scheduler.kv_holding_waiting.append(loaded)
    paced.pace.prefilled(time.monotonic())
    assert not paced.hold(scheduler), "the load is not there yet"
    scheduler.finished_recving_kv_req_ids.add(loaded.request_id)
    assert paced.hold(scheduler)
    scheduler.running[0].is_prefill_chunk = True
    with paced.sharing(scheduler):
        assert scheduler.scheduler_config.long_prefill_token_threshold == 768, "1099 less 100, in blocks"


def test_vllm_still_has_what_is_asked_of_it() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.__init__)
    assert all(
        f"self.{name} = " in source or f"self.{name}: " in source for name in queues([], []) if name[0] != "_"
    )


def test_vllm_reads_the_limit_in_every_step() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    assert "self.scheduler_config.long_prefill_token_threshold" in source


def test_a_step_that_fills_its_budget_starts_no_pause() -> None:
    """A long prompt's chunks follow each other as without VAMP: none of them could have served another."""
    paced = paced_prefills()
    assert paced.read_s == 50.0
    scheduler = SimpleNamespace(**queues([a_request()], [a_request()]))
    for tokens, requests, held in ((950, 2, False), (4, 4, False), (500, 2, True)):
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=tokens, num_scheduled_tokens=dict.fromkeys(range(requests))
        )
        paced.scheduled(output, budget=1000, left=1, least=100)
        assert paced.hold(scheduler) is held
    paced.pace._last_s = -math.inf
    long: Any = SimpleNamespace(total_num_scheduled_tokens=850, num_scheduled_tokens={"a": 849, "b": 1})
    paced.scheduled(long, budget=1000, left=1, least=200)
    assert not paced.hold(scheduler), "what is left is no chunk of anybody's"
    paced._cut = True
    paced.scheduled(long, budget=1000, left=1, least=200)
    assert paced.hold(scheduler), "its prompts were cut to leave room"
    paced._arbiter.controller.level = 20
    assert paced.read_s == 100.0, "no more than there is on the host"
