"""Scenarios on a real engine, one per function, each run in its own process (``support.engine``).

A scenario returns plain data; the tests judge it.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.faulty import FaultyDriver
from vamp_runtime.memory.ledger import OwnerKind

MIB = 1 << 20
VOCABULARY = 2048
# A policy that expands whenever it may, however slow the machine is.
EAGER = str(Path(__file__).parents[1] / "data" / "eager.toml")


class Rig:
    """An in-process engine, its scheduler and worker, and a step loop with a hook."""

    def __init__(self, model: str, *, vamp: dict[str, Any] | None, routing: str = "", **options: Any) -> None:
        from vllm import EngineArgs, LLMEngine

        if routing:
            _simulate(routing)
        if vamp is not None:
            options |= {
                "load_format": "vamp",
                "additional_config": {"vamp": {"model": "tiny-qwen3-next", **vamp}},
            }
        settings = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1024,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 8 * MIB,
        }
        import torch

        if torch.cuda.is_available():
            settings["gpu_memory_utilization"] = 0.1  # other tests' engines may lie on the same GPU
        elif "language_model_only" not in options:
            # vLLM sets it on CPUs with bf16 instructions; blocks are then of one size on all of them.
            settings["mamba_ssm_cache_dtype"] = "float32"
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **(settings | options)))
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        # With several ranks the workers are processes of their own.
        self.worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
        if vamp is not None and self.worker is not None:
            self.worker._memory.slab.seal()  # a GPU engine does not, for the time it takes
        self.highest_id = 0
        self._added = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        before_step: Callable[[int], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Run all prompts at once; tokens and cached tokens of each, in order."""
        from vllm import SamplingParams

        names = []
        for prompt in prompts:
            names.append(f"r{self._added}")
            self._added += 1
            sampling = SamplingParams(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
            )
            self.engine.add_request(names[-1], {"prompt_token_ids": list(prompt)}, sampling)
        results: dict[str, dict[str, Any]] = {}
        step = 0
        while self.engine.has_unfinished_requests():
            if before_step is not None:
                before_step(step)
            step += 1
            assert step < 20_000, "no progress"
            for output in self.engine.step():
                if output.finished:
                    tokens = list(output.outputs[0].token_ids)
                    results[output.request_id] = {"tokens": tokens, "cached": output.num_cached_tokens}
            self._note_ids()
        return [results[name] for name in names]

    def settle(self) -> None:
        """Let commands and steps that are still on their way travel, as the engine loop would."""
        core = self.engine.engine_core.engine_core
        for _ in range(1000):
            if not self.scheduler.has_requests() and not core.batch_queue:
                return
            core.step_fn()
        raise AssertionError("the engine does not come to rest")

    def check(self) -> None:
        """Every invariant that scheduler and worker can see together."""
        if self.worker._mover.busy:
            self.engine.engine_core.engine_core.step_fn()  # a step without tokens waits for it
        self.worker._mover.rest()
        boundary, controller = self.worker._boundary, self.scheduler.arbiter.controller
        boundary.check_integrity()
        boundary.slab.verify_all()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert len(pool.blocks) == pool.num_gpu_blocks == self.scheduler.kv_cache_config.num_blocks
        assert pool.num_gpu_blocks == self.scheduler.cache_config.num_gpu_blocks
        assert pool.blocks[0].is_null and all(block.block_id == i for i, block in enumerate(pool.blocks))
        if controller.capacity is not None and not controller.moving:
            assert controller.level == boundary.slab.level
            assert controller.mapped_blocks == boundary.region.blocks
            assert pool.num_gpu_blocks <= boundary.region.blocks
        hashed = [b for group in pool.cached_block_hash_to_block._cache.values() for b in _blocks(group)]
        assert all(block.block_id < pool.num_gpu_blocks for block in hashed)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.scheduler.vamp_report()
        return {name: value for name, value in report.items() if name not in ("decision_log", "timeline")}

    def _note_ids(self) -> None:
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                self.highest_id = max([self.highest_id, *(block.block_id for block in blocks)])


def _simulate(routing: str) -> None:
    """Route as the strategy of this name says, as an engine started with it in its environment would."""
    from vamp_integration import benchmark_routing
    from vamp_integration.lognormal import VARIABLE

    os.environ[VARIABLE] = routing
    benchmark_routing.register()


def _blocks(entry: Any) -> list[Any]:
    return list(entry.values()) if isinstance(entry, dict) else [entry]


def prompts(seed: int, count: int, length: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for _ in range(count)]


def oracle(model: str, works: list[dict[str, Any]], kv_mib: int = 64, **options: Any) -> Any:
    """Unmodified vLLM with a large pool: the tokens of each work (``seed, count, length, max_tokens``)."""
    rig = Rig(model, vamp=None, kv_cache_memory_bytes=kv_mib * MIB, **options)
    return {"works": [_one_by_one(rig, **work) for work in works]}


def _one_by_one(rig: Rig, seed: int, count: int, length: int, max_tokens: int) -> list[dict[str, Any]]:
    return [rig.generate([prompt], max_tokens)[0] for prompt in prompts(seed, count, length)]


def exercised(
    model: str, seed: int, count: int, length: int, max_tokens: int, kv_mib: int, **options: Any
) -> Any:
    """A level moves in every step, up to the bound and down again."""
    vamp = {"max_offload_ratio": 0.5, "exercise_steps": 1, **options.pop("vamp", {})}
    rig = Rig(model, vamp=vamp, kv_cache_memory_bytes=kv_mib * MIB, **options)
    initial = rig.scheduler.kv_cache_config.num_blocks
    results = []
    for prompt in prompts(seed, count, length):
        results += rig.generate([prompt], max_tokens)
        rig.check()
    memory = rig.worker._memory
    return {
        "results": results,
        "initial": initial,
        "highest_id": rig.highest_id,
        "hits": memory.hits.tolist(),
        "peer_homes": memory.slab.geometry.peer_homes,
        "host_homes": memory.slab.geometry.host_homes,
        "tier_bytes": {tier.value: size for tier, size in memory.driver.usage().tier_bytes.items()},
        **rig.report(),
    }


def new_domain(model: str, routing: str, kv_mib: int, **work: int) -> Any:
    """Simulated routing whose domain changes while the engine runs; hits in each half."""
    extension = "vamp_integration.benchmark_routing.RoutingDomain"
    rig = Rig(
        model,
        vamp={"max_offload_ratio": 0.25},
        routing=routing,
        kv_cache_memory_bytes=kv_mib * MIB,
        worker_extension_cls=extension,
    )
    halves = []
    for domain in (0, 1):
        rig.engine.collective_rpc("set_routing_domain", args=(domain,))
        rig.worker._memory.hits.zero_()
        _one_by_one(rig, **work)
        halves.append(rig.worker._memory.hits.tolist())
    return {"halves": halves}


def reselecting(
    model: str,
    routing: str,
    work: dict[str, int],
    vamp: dict[str, Any] | None,
    kv_mib: int,
    refuse_every: int = 0,
    **options: Any,
) -> Any:
    """A third of the experts out, chosen on one domain, and then another domain served, one work after the
    other. ``refuse_every``: the driver refuses one call of every so many moves, a later one each time."""
    drivers = _faulty_drivers() if refuse_every else []
    rig = Rig(
        model,
        vamp=vamp,
        routing=routing,
        kv_cache_memory_bytes=kv_mib * MIB,
        enable_prefix_caching=False,
        worker_extension_cls="vamp_integration.benchmark_routing.RoutingDomain",
        **options,
    )
    if vamp is None:
        first = _one_by_one(rig, **work)
        rig.engine.collective_rpc("set_routing_domain", args=(1,))
        return {"results": first + _one_by_one(rig, **work)}
    rig.worker.home_refresh_steps = 8
    arbiter, boundary, hits = rig.scheduler.arbiter, rig.worker._boundary, rig.worker._memory.hits
    # Counts first, so that what leaves is what the first domain uses least.
    results = _one_by_one(rig, **work)
    arbiter.levels.want(arbiter.controller.max_level)
    rig.generate(prompts(9, 1, 32), 16)
    rig.settle()
    rig.check()
    run, turn = boundary.run, iter(range(1, 1_000_000))

    def run_with_fault(move: Any) -> Any:
        number = next(turn)
        drivers[0].arm(number // refuse_every if number % refuse_every == 0 else 0)
        outcome = run(move)
        drivers[0].arm(0)
        boundary.check_integrity()
        return outcome

    if refuse_every:
        boundary.run = run_with_fault
    first_out = [boundary.slab.out(layer) for layer in range(boundary.slab.geometry.layers)]
    rig.engine.collective_rpc("set_routing_domain", args=(1,))
    hits.zero_()
    results += _one_by_one(rig, **work)
    rig.settle()
    rig.check()
    counts = hits.tolist()
    last_out = [boundary.slab.out(layer) for layer in range(boundary.slab.geometry.layers)]

    def share(out: list[tuple[int, ...]]) -> float:
        """Of the second domain's selections, those of experts that are out."""
        away = [
            counts[layer][e]
            for layer, groups in enumerate(out)
            for group in groups
            for e in boundary.slab.experts_of(layer, group)
        ]
        return sum(away) / sum(map(sum, counts))

    return {
        "results": results,
        "first_share": share(first_out),
        "last_share": share(last_out),
        "pool_blocks": arbiter.pool.num_gpu_blocks,
        **rig.report(),
    }


def profiled(model: str, prompts: str, output: str, max_tokens: int) -> Any:
    """``vamp profile-routing`` in this process."""
    from vamp_integration.cli.profile_routing import profile_routing

    engine = ["max_model_len=512", f"kv_cache_memory_bytes={8 * MIB}", "dtype=bfloat16"]
    profile_routing(model, Path(prompts), None, Path(output), max_tokens, engine, ["model=tiny-qwen3-next"])
    return {"done": True}


def families(model: str, work: dict[str, int], kv_mib: int, **options: Any) -> Any:
    """Every checkpoint of the folder in turn: vLLM alone, then VAMP; a failure is that family's result."""
    import torch

    options |= {"kv_cache_memory_bytes": kv_mib * MIB, "enable_prefix_caching": False}
    done, collect = {}, gc.collect
    if not torch.cuda.is_available():
        # vLLM collects garbage eight times an engine, half of the time that these engines take.
        gc.collect = lambda generation=2: 0
    for folder in sorted(Path(model).iterdir()):
        try:
            done[folder.name] = _proven(folder, work, options)
        except Exception:  # whatever vLLM raises for this one, the others still count
            done[folder.name] = {"error": traceback.format_exc()}
        collect()
    return done


def _proven(folder: Path, work: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """Tokens without VAMP, with a level moving in every step, and with the experts that are out spoilt."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    path, options, briefly = str(folder / "model"), dict(options), {**work, "max_tokens": 12}
    vamp = {"max_offload_ratio": 0.5, "exercise_steps": 1, "record_order": str(folder / "order.json")}
    vamp |= {"model": "auto", **options.pop("vamp", {})}
    # VAMP's kernel rounds in another order than vLLM's, so it is held against itself without moves.
    alone = {**vamp, "exercise_steps": 0} if vamp.get("moe_kernel") == "vamp" else None
    rig = Rig(path, vamp=alone, **options)
    still = _one_by_one(rig, **work)
    del rig
    cleanup_dist_env_and_memory()
    rig = Rig(path, vamp=vamp, **options)
    # A tail goes back when the request that uses it has ended: a quick engine needs more requests.
    moved = [_one_by_one(rig, **work)]
    while sum(rig.scheduler.arbiter.journal.moves.values()) < 20 and len(moved) < 10:
        moved.append(_one_by_one(rig, **work))
    rig.settle()
    rig.check()
    report = rig.report()
    arbiter, shrinker = rig.scheduler.arbiter, rig.scheduler.shrinker
    shrinker.settings = dataclasses.replace(shrinker.settings, exercise_steps=0, restore=False)
    arbiter.levels.want(arbiter.controller.max_level)
    _one_by_one(rig, **briefly)
    with _spoilt(rig, _offloaded(rig, range(rig.worker._boundary.slab.geometry.layers))):
        spoilt = _one_by_one(rig, **briefly)
    del rig
    cleanup_dist_env_and_memory()
    return {"still": still, "moved": moved, "spoilt": spoilt, **report}


def refused_late(model: str, **options: Any) -> Any:
    """The ``ConfigError`` of an engine whose configuration passes, whatever its architecture."""
    from vamp_integration import model_rules
    from vamp_runtime.errors import ConfigError

    model_rules.REFUSED.clear()
    try:
        Rig(model, vamp={}, **options)
    except ConfigError as error:
        return {"message": str(error)}
    return {"message": "it started"}


def corrupted(
    model: str, seed: int, count: int, length: int, max_tokens: int, kv_mib: int, **options: Any
) -> Any:
    """Everything offloaded that may be; one offloaded expert is spoilt, then one block on a moved page."""
    rig = Rig(
        model,
        vamp={"max_offload_ratio": 0.5, "restore": False, **options.pop("vamp", {})},
        kv_cache_memory_bytes=kv_mib * MIB,
        enable_prefix_caching=False,
        **options,
    )
    initial = rig.scheduler.kv_cache_config.num_blocks
    (prompt,) = prompts(seed, count, length)
    rig.generate([prompt], 2)
    arbiter = rig.scheduler.arbiter
    arbiter.levels.want(arbiter.controller.max_level)
    rig.generate([prompt], 24, lambda _: arbiter.levels.draw(arbiter.controller.reserve_blocks) and None)
    sound = rig.generate([prompt], max_tokens)
    level = rig.worker._boundary.slab.level
    with _spoilt(rig, [_most_used_offloaded(rig)]):
        expert = rig.generate([prompt], max_tokens)
    again = rig.generate([prompt], max_tokens)
    block = rig.generate([prompt], max_tokens, lambda step: _spoil_block(rig, initial) if step == 2 else None)
    rig.check()
    return {"sound": sound, "expert": expert, "again": again, "block": block, "level": level, **rig.report()}


def _most_used_offloaded(rig: Rig) -> tuple[int, int]:
    """Layer and expert: of the first layer, and out."""
    hits = rig.worker._memory.hits
    return max(_offloaded(rig, range(1)), key=lambda place: int(hits[place]))


def _offloaded(rig: Rig, layers: range) -> list[tuple[int, int]]:
    """Layer and expert of all that are out."""
    slab = rig.worker._boundary.slab
    groups = [(layer, group) for layer in layers for group in slab.out(layer)]
    return [(layer, expert) for layer, group in groups for expert in slab.experts_of(layer, group)]


@contextmanager
def _spoilt(rig: Rig, experts: Sequence[tuple[int, int]]) -> Iterator[None]:
    """``experts``, all out, hold other weights inside the block."""
    slab, driver = rig.worker._boundary.slab, rig.worker._memory.driver
    assert experts
    saved = []
    for layer, expert in experts:
        record = slab.record(layer, expert)
        home = slab.slot_table[layer][expert]  # its own address may lead nowhere
        assert home != record
        for part, size in enumerate(slab.geometry.part_bytes):
            address = slab.address(layer, part, home)
            saved.append((address, driver.read(address, size)))
    for address, data in saved:
        half = len(data) // 2  # finite weights still, so that one NaN does not stand for all
        driver.write(address, data[half:] + data[:half])
    yield
    for address, data in saved:
        driver.write(address, data)


def _spoil_block(rig: Rig, initial: int) -> None:
    region = rig.worker._boundary.region
    managers = rig.scheduler.kv_cache_manager.coordinator.single_type_managers
    used = {b.block_id for m in managers for blocks in m.req_to_blocks.values() for b in blocks}
    moved = sorted(block for block in used if block >= initial)
    assert moved, f"no block beyond the first pool is in use: {sorted(used)}"
    rig.worker._memory.driver.write(
        region.address(moved[0]), random.Random(1).randbytes(region.geometry.block_stride)
    )


def faulty(
    model: str, seed: int, count: int, length: int, max_tokens: int, kv_mib: int, **options: Any
) -> Any:
    """A level moves in every step; the driver refuses one call of every other move, a later one each time."""
    vamp = {"max_offload_ratio": 0.5, "exercise_steps": 1}
    drivers = _faulty_drivers()
    rig = Rig(model, vamp=vamp, kv_cache_memory_bytes=kv_mib * MIB, **options)
    boundary, (driver,) = rig.worker._boundary, drivers
    run, turn = boundary.run, iter(range(1, 1_000_000))

    def run_with_fault(move: Any) -> Any:
        number = next(turn)
        driver.arm(number // 2 if number % 2 else 0)
        outcome = run(move)
        driver.arm(0)
        boundary.check_integrity()
        return outcome

    boundary.run = run_with_fault
    from vamp_integration import levels

    levels.RETRY_S = 0.0
    results = []
    for prompt in prompts(seed, count, length):
        results += rig.generate([prompt], max_tokens)
        rig.check()
    return {"results": results, **rig.report()}


def _faulty_drivers() -> list[FaultyDriver]:
    """From now on the worker's host drivers are wrapped; the list fills as they are made."""
    from vamp_integration import memory_driver

    made: list[FaultyDriver] = []
    original = memory_driver.HostDriver

    def make(*args: Any, **kwargs: Any) -> FaultyDriver:
        made.append(FaultyDriver(original(*args, **kwargs)))
        return made[-1]

    memory_driver.HostDriver = make  # type: ignore[misc, assignment]
    return made


def rounds(
    model: str,
    seed: int,
    count: int,
    length: int,
    growth: int,
    turns: int,
    max_tokens: int,
    kv_mib: int,
    **options: Any,
) -> Any:
    """Multi-turn sessions that take turns, each turn's prompt extending the last."""
    vamp = options.pop("vamp", None)
    rig = Rig(model, vamp=vamp, kv_cache_memory_bytes=kv_mib * MIB, **options)
    sessions = prompts(seed, count, length + growth * turns)
    results = []
    for turn in range(turns):
        for session in sessions:
            results += rig.generate([session[: length + growth * turn]], max_tokens)
            if vamp is not None:
                rig.check()
    return {"results": results, **(rig.report() if vamp is not None else {})}


def together(
    model: str, seed: int, count: int, length: int, max_tokens: int, kv_mib: int, **options: Any
) -> Any:
    """All prompts at once: growth within a running batch, preemption where there is none."""
    vamp = options.pop("vamp", None)
    rig = Rig(model, vamp=vamp, kv_cache_memory_bytes=kv_mib * MIB, **options)
    preempted = []
    original = rig.scheduler._preempt_request
    rig.scheduler._preempt_request = lambda request, *a, **k: (
        preempted.append(1),
        original(request, *a, **k),
    )[1]
    results = rig.generate(prompts(seed, count, length), max_tokens)
    if vamp is not None:
        rig.settle()
        rig.check()
    return {"results": results, "preempted": len(preempted), **(rig.report() if vamp is not None else {})}


def not_this_step(model: str, kv_mib: int) -> Any:
    """Several prompts with one common prefix in a nearly empty pool draw the hybrid manager's sentinel."""
    rig = Rig(
        model,
        vamp={"max_offload_ratio": 0.5, "policy": EAGER},
        kv_cache_memory_bytes=kv_mib * MIB,
        max_num_seqs=4,
    )
    (common,) = prompts(5, 1, 800)
    results = rig.generate([common + tail for tail in prompts(6, 3, 100)], 8)
    rig.check()
    return {"results": results, **rig.report()}


def shrinking(model: str, kv_mib: int, count: int = 8, length: int = 700, **options: Any) -> Any:
    """Grow on demand, then take everything back while a request runs, idle, and with growth in between."""
    rig = Rig(
        model,
        vamp={"max_offload_ratio": 0.5, "policy": EAGER, "restore": False, **options.pop("vamp", {})},
        kv_cache_memory_bytes=kv_mib * MIB,
        **options,
    )
    arbiter, shrinker = rig.scheduler.arbiter, rig.scheduler.shrinker
    controller, pool = arbiter.controller, arbiter.pool
    initial = pool.num_gpu_blocks
    sessions = prompts(7, count, length)
    for session in sessions:
        rig.generate([session], 4)
    rig.settle()
    grown = pool.num_gpu_blocks
    log: dict[str, Any] = {"initial": initial, "grown": grown, "level": controller.level}

    def restore_while_running(step: int) -> None:
        # Not while a refill of the reserve is still on its way.
        if step >= 1 and not log.get("began"):
            log["began"] = shrinker.restore(1)

    rig.generate([sessions[0]], 24, restore_while_running)
    rig.settle()
    rig.check()
    log["after_running"] = controller.level

    def restore_and_want_it_back(step: int) -> None:
        if step == 1 and controller.level:
            shrinker.restore(1)

    for session in sessions[:4]:
        rig.generate([session], 8, restore_and_want_it_back)
        rig.settle()
        rig.check()
    log["after_thrash"] = controller.level
    while controller.level:
        assert shrinker.restore(1)
        rig.settle()
        rig.check()
    log["idle"] = controller.level
    log["pool_after"] = pool.num_gpu_blocks
    log["again"] = rig.generate(sessions[:2], 8)
    rig.check()
    return {**log, **{f"report_{k}": v for k, v in rig.report().items()}}


def paced(model: str, *, read_s: float, share: float, max_tokens: int, **options: Any) -> dict[str, Any]:
    """One request decodes; another comes right after the first's prefill. Steps of each kind, by time.

    Experts of one level are out, and the link is so slow that reading them takes ``read_s``.
    """
    from vllm import SamplingParams

    from vamp_integration import configure

    rig = Rig(model, vamp={"prefill_share": share}, kv_cache_memory_bytes=8 * MIB, max_num_seqs=4, **options)
    warm, first, second = prompts(1, 3, 40)
    rig.generate([warm])
    configure.hold(rig.scheduler, 1)
    rig.settle()
    paced, scheduled = rig.scheduler.paced, []
    paced._bandwidth = rig.scheduler.arbiter.controller.capacity.level_bytes / read_s
    schedule = rig.scheduler.schedule

    def note(*arguments: Any) -> Any:
        at = time.monotonic()
        output = schedule(*arguments)
        if output.num_scheduled_tokens:
            prefills = sum(tokens > 1 for tokens in output.num_scheduled_tokens.values())
            scheduled.append((at, prefills, len(output.num_scheduled_tokens)))
        return output

    rig.scheduler.schedule = note
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    tokens: dict[str, list[int]] = {}

    def step() -> None:
        for output in rig.engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)

    for name, tokens_of in (("first", first), ("second", second)):
        rig.engine.add_request(name, {"prompt_token_ids": tokens_of}, sampling)
        step()
    while rig.engine.has_unfinished_requests():
        step()
    return {"read_s": paced.read_s, "held": paced.pace.held_steps, "steps": scheduled, "tokens": tokens}


def reconfigured(model: str, kv_mib: int) -> Any:
    """Levels held whatever the demand, then a bound below the one at start, then homes by use."""
    from vamp_integration import configure
    from vamp_runtime.errors import ConfigError

    rig = Rig(
        model,
        vamp={"max_offload_ratio": 0.5, "policy": EAGER, "restore": False},
        kv_cache_memory_bytes=kv_mib * MIB,
    )
    scheduler, controller = rig.scheduler, rig.scheduler.arbiter.controller
    pool = scheduler.kv_cache_manager.block_pool
    sessions = prompts(12, 8, 700)
    log: dict[str, Any] = {"initial": pool.num_gpu_blocks, "refused": []}

    def refused(function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except ConfigError as error:
            log["refused"].append(str(error))

    refused(configure.hold, scheduler, 1)
    rig.generate(sessions[:1], 2)
    refused(configure.hold, scheduler, controller.capacity.max_level + 1)
    refused(configure.configure, scheduler, {"moe_kernel": "vamp"})
    refused(configure.configure, scheduler, {"max_offload_ratio": 0.75})

    def serve() -> int:
        for session in sessions:
            rig.generate([session], 2)
        rig.settle()
        rig.check()
        return controller.level

    def hold(level: int) -> int:
        scheduler.reset_prefix_cache()
        configure.hold(scheduler, level)
        rig.settle()
        return serve()

    log["held"], log["pool_held"] = hold(3), pool.num_gpu_blocks
    top_k = scheduler.vllm_config.model_config.hf_text_config.num_experts_per_tok
    log["host_bytes"] = [configure.host_bytes(rig.worker, tokens, top_k) for tokens in (1, 1000)]
    log["held_at_0"], log["pool_at_0"] = hold(0), pool.num_gpu_blocks
    log["host_bytes_at_0"] = configure.host_bytes(rig.worker, 8, top_k)
    configure.configure(scheduler, {"max_offload_ratio": 2 / 32, "policy": EAGER})
    configure.release(scheduler)
    log["bounded"] = serve()
    hold(0)
    hits = rig.worker._memory.hits.tolist()
    log["copied"] = configure.follow_coldest(rig.worker)
    slab = rig.worker._memory.slab
    homed = [[e for g in slab.ready(layer, 99) for e in slab.experts_of(layer, g)] for layer in range(4)]
    log["homed"] = [[hits[layer][e] for e in experts] for layer, experts in enumerate(homed)]
    log["hits"] = hits
    rig.check()
    return {**log, "report": rig.report()}


def serve_benchmark(model: str, argv: list[str]) -> Any:
    """``bench/serve_h200.py`` with these arguments; its exit code."""
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    import serve_h200

    return {"code": serve_h200.main(argv)}


class _FlakyOnRankOne(FaultyDriver):
    """Refuses every 61st mapping call of rank 1's moves; an undo needs fewer calls than that."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, calls={"map", "unmap", "set_access"}, mode="every")

    def mark(self) -> object:
        import torch.distributed as dist

        if self.fail_at == 0 and dist.get_rank() == 1:
            self.arm(61)
        return self.inner.mark()


def two_ranks(model: str, fault: str) -> Any:
    """Tensor parallel over two processes, a level moving in every step; ``fault`` on rank 1 alone."""
    import torch.distributed as dist
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vamp_integration import levels, memory_driver, worker
    from vamp_runtime.errors import StateLost

    # Forked ranks have what is replaced here; the CPU platform would spawn them.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    work = {"seed": 11, "count": 3, "length": 300, "max_tokens": 20}
    options = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enable_prefix_caching": False,
    }
    if fault == "unmodified":
        return {"results": oracle(model, [work], **options)["works"][0]}
    levels.RETRY_S = 0.0
    if fault == "driver and memory":
        host = memory_driver.HostDriver
        memory_driver.HostDriver = lambda **kwargs: _FlakyOnRankOne(host(**kwargs))  # type: ignore[misc, assignment]
        available = CPUWorker.determine_available_memory

        def less_on_rank_one(self: Any) -> int:
            return available(self) - (dist.get_rank() == 1) * MIB // 2

        CPUWorker.determine_available_memory = less_on_rank_one  # type: ignore[method-assign]
    if fault == "lost":
        run = worker.Boundary.run

        def lose(self: Any, move: Any) -> Any:
            if dist.get_rank() == 1 and move.epoch == 5:
                raise StateLost("on purpose")
            return run(self, move)

        worker.Boundary.run = lose  # type: ignore[method-assign]
    vamp = {"max_offload_ratio": 0.5, "exercise_steps": 1}
    rig = Rig(model, vamp=vamp, kv_cache_memory_bytes=3 * MIB, **options)
    try:
        return {"results": _one_by_one(rig, **work), **rig.report()}
    except Exception as error:  # whatever vLLM raises for a dead rank is the result here
        return {"error": f"{type(error).__name__}: {error}", **rig.report()}


def two_ranks_swap(model: str, routing: str, vamp: dict[str, Any] | None, **work: int) -> Any:
    """Tensor parallel over two processes; the domain of simulated routing changes half-way."""
    from vllm.v1.executor import multiproc_executor

    from vamp_integration import worker

    # Forked ranks have what is replaced here; the CPU platform would spawn them.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    worker.VampWorkerMixin.home_refresh_steps = 8
    rig = Rig(
        model,
        vamp=vamp,
        routing=routing,
        kv_cache_memory_bytes=(3 if vamp else 64) * MIB,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls="vamp_integration.benchmark_routing.RoutingDomain",
    )
    results = _one_by_one(rig, **work)
    if vamp is not None:
        rig.scheduler.arbiter.levels.want(rig.scheduler.arbiter.controller.max_level)
    rig.engine.collective_rpc("set_routing_domain", args=(1,))
    results += _one_by_one(rig, **work)
    return {"results": results, **(rig.report() if vamp is not None else {})}


def child(name: str, model: str, spec: dict[str, Any], sender: Connection, log: str) -> None:
    """Body of a scenario's process: its output goes to ``log``, its result through ``sender``.

    ``name`` is of a function here, or ``module.function`` of a module beside this one.
    """
    with open(log, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from vllm.model_executor.models import registry

    # vLLM inspects a model that it sees for the first time in a process of its own, which imports vLLM anew.
    registry._run_in_subprocess = lambda inspect: inspect()
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(f"support.{module}"), function) if module else globals()[name]
    sender.send(found(model, **spec))
    sender.close()


def exported(model: str, kv_mib: int = 8, count: int = 1, max_tokens: int = 100, **options: Any) -> Any:
    """Levels go up and down, with statistics on: what this process's Prometheus registry says then."""
    from prometheus_client import REGISTRY

    vamp = {"max_offload_ratio": 0.5, "exercise_steps": 1}
    rig = Rig(model, vamp=vamp, kv_cache_memory_bytes=kv_mib * MIB, disable_log_stats=False, **options)
    _one_by_one(rig, seed=3, count=count, length=100, max_tokens=max_tokens)
    samples = [
        (sample.name, sample.labels, sample.value)
        for family in REGISTRY.collect()
        if family.name.startswith("vamp:")
        for sample in family.samples
    ]
    pages = {kind.value: rig.worker._memory.ledger.count(kind) for kind in OwnerKind}
    return {"samples": samples, "counted": pages, **rig.report()}


def host_copies(
    model: str,
    seed: int,
    count: int,
    length: int,
    turns: int,
    kv_mib: int,
    host_mib: int,
    most: int | None = None,
    late: bool = True,
    policy: str = EAGER,
    reserve: int = 1,
    grow: bool = False,
    **options: Any,
) -> Any:
    """Sessions that take turns, with KV offloading to host.

    After every turn the tail goes back as soon as it can, while blocks in it are still being copied. ``most``
    is the highest level to ask for; ``late`` copies are made as late as they may (``support.late_copies``).
    With a ``reserve`` the first tail that goes back stays mapped as the new reserve; without one it is gone.
    With ``grow`` a level is asked for ahead of every session that finds none, whatever the policy would do.
    """
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_mib * MIB}
    if late:
        extra |= {"spec_name": "LateSpec", "spec_module_path": "support.late_copies"}
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    rig = Rig(
        model,
        vamp={"max_offload_ratio": 0.5, "policy": policy, "restore": False, "reserve_levels": reserve},
        kv_cache_memory_bytes=kv_mib * MIB,
        kv_transfer_config=connector,
        **{"max_model_len": 1024, **options},
    )
    controller, shrinker = rig.scheduler.arbiter.controller, rig.scheduler.shrinker
    controller.limit = most
    results, restored = [], 0
    for _ in range(turns):
        for session in prompts(seed, count, length):
            if grow and controller.level == 0 and not controller.moving:
                rig.scheduler.arbiter.levels.want(1)
            results += rig.generate([session], 4)
            if controller.level and not controller.moving and rig.scheduler.arbiter.pool.cordon_limit is None:
                restored += shrinker.restore(1)
            rig.settle()
            rig.check()
    transfers = rig.scheduler.arbiter.host_kv.transfers
    return {
        "results": results,
        "restored": restored,
        "loaded_blocks": transfers.loaded_blocks,
        "left": transfers.blocks,
        **rig.report(),
    }
