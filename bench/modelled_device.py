"""A modelled device under vLLM's real engine core: a virtual clock, steps that take predicted time.

Predictions, not measurements. What is real: vLLM's scheduler, KV cache planner and manager, VAMP's scheduler,
arbiter, controller and policies. What is modelled: every second that passes (``StepModel``), and the workers'
side of VAMP's moves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import torch
from modelled_host_kv import ModelledCopies
from numpy.typing import NDArray
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput

from vamp_integration import settings
from vamp_integration.cold_reads import LevelCounts
from vamp_integration.commands import MemoryFigures, Report, get_command, put_report
from vamp_runtime.controller import Capacity
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.move import Move, Outcome
from vamp_runtime.policy.measured import lognormal_shares

TOKEN = 7  # what every request is answered with


class Clock:
    """Seconds that pass only when told to, by a microsecond at least: less could be lost in rounding."""

    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(1e-6, seconds) if seconds > 0 else 0.0

    def until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """The module ``time`` follows ``clock``: the engine, VAMP and the load know no other."""
    readers = ("monotonic", "time", "perf_counter")
    with mock.patch.multiple(time, sleep=clock.sleep, **dict.fromkeys(readers, clock)):
        yield


@dataclass(frozen=True)
class StepModel:
    """Qwen3-Next with 24 layers on one H200. Times in seconds, sizes in bytes.

    Attributes:
        decode_s: (tokens, seconds) of a step; measured, bench/results/h200. Beyond the last, weights are read
            whole and more tokens cost ``prefill_token_s``.
        prefill_token_s: of each prompt token; with ``decode_s`` 84,000 tokens/s in steps of 8,192, measured.
        context_token_s: of each prompt token and token before it (attention of 6 layers); fitted.
        launch_s: host time to launch a step with prompt tokens of more than ``graph_tokens``, and
        graph_launch_s: of fewer, whose layers replay graphs but for attention; measured. Meanwhile the host
            schedules nothing.
        graph_tokens: of the largest graph, as vLLM captures them for 128 sequences.
        behind_s: of such a step, what the device still does when all is launched, at least; measured.
        submit_token_s: host time of a submission for each of its tokens; fitted.
        layers, experts, top_k, expert_bytes: of the model.
        link: bytes/s at which a kernel reads host memory, measured.
        apart: of reads and compute, the part of the shorter that the longer does not hide, in steps that
            decode and in those with prompt tokens; measured.
        sigma: of the routing simulation.
        load_start_s: host time to begin a load from vLLM's KV cache in host memory; fitted.
        level_s: moving the pages of one level, measured.
        page_bytes, block_bytes, pages, max_level: memory that VAMP starts with and can gain, as its log says.
        blocks: of its pool at start.
        staging_pages: that staging takes of the KV budget, but not beside KV offloading.
        home_steps: steps between two looks at the hit counters, as the worker's.
    """

    decode_s: tuple[tuple[int, float], ...] = (
        (1, 3.1e-3),
        (4, 3.9e-3),
        (16, 7.5e-3),
        (64, 15.8e-3),
        (128, 20.3e-3),
    )
    prefill_token_s: float = 9.4e-6
    context_token_s: float = 1.1e-10
    launch_s: float = 0.075
    graph_launch_s: float = 0.038
    graph_tokens: int = 256
    behind_s: float = 0.03
    submit_token_s: float = 5e-7
    layers: int = 24
    experts: int = 512
    top_k: int = 10
    expert_bytes: int = 6 << 20
    link: float = 53e9
    apart: tuple[float, float] = (0.4, 0.15)
    sigma: float = 1.06
    load_start_s: float = 0.02
    level_s: float = 9e-3
    page_bytes: int = 6 << 20
    block_bytes: int = 6_684_672
    pages: int = 1284
    max_level: int = 128
    blocks: int = 1185
    staging_pages: int = 84
    home_steps: int = 64

    def resident_s(self, prompt_tokens: int, decode_tokens: int, context: int) -> float:
        """A step with every expert in HBM.

        Args:
            context: sum over prompt tokens of the tokens before them.
        """
        tokens = prompt_tokens + decode_tokens
        known, seconds = zip(*self.decode_s, strict=True)
        base = float(np.interp(tokens, known, seconds))
        return base + prompt_tokens * self.prefill_token_s + context * self.context_token_s

    def step_s(self, prompt_tokens: int, decode_tokens: int, context: int, level: int, region: bool) -> float:
        """The step with the ``level`` coldest experts of each layer on the host, whose reads overlap it.

        Args:
            region: all of them are copied before every layer.
        """
        touched = level if region else self.reads(prompt_tokens + decode_tokens)[level]
        layer_s = self.resident_s(prompt_tokens, decode_tokens, context) / self.layers
        shorter, longer = sorted((layer_s, float(touched) * self.expert_bytes / self.link))
        return self.layers * (longer + self.apart[prompt_tokens > 0] * shorter)

    def reads(self, tokens: float) -> NDArray[np.float64]:
        """By level, distinct experts of the coldest that ``tokens`` tokens are routed to, expected."""
        return _reads(self.inclusion(), tokens)

    def inclusion(self) -> tuple[float, ...]:
        """Chance that a token is routed to each expert, coldest first; the sum is ``top_k``."""
        return _inclusion(self.experts, self.top_k, self.sigma)

    def unstaged(self) -> StepModel:
        """The same without staging, whose memory goes to the KV cache."""
        more = self.staging_pages * self.page_bytes // self.block_bytes
        return replace(
            self, pages=self.pages + self.staging_pages, blocks=self.blocks + more, staging_pages=0
        )

    def blocks_at(self, level: int) -> int:
        return (self.pages + level * self.layers) * self.page_bytes // self.block_bytes


@lru_cache
def _inclusion(experts: int, top_k: int, sigma: float) -> tuple[float, ...]:
    """``top_k`` draws without replacement as a race of exponential clocks, stopped when k have come in."""
    shares = np.array(lognormal_shares(experts, sigma))
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-shares * middle).sum() < top_k else (low, middle)
    return tuple(-np.expm1(-shares * low))


@lru_cache(maxsize=20_000)
def _reads(inclusion: tuple[float, ...], tokens: float) -> NDArray[np.float64]:
    touched = 1 - (1 - np.array(inclusion)) ** tokens
    return np.concatenate(([0.0], touched.cumsum()))


class Pending(Future):  # type: ignore[type-arg]
    """A step's output, which is there when the clock has come to ``at``; asking for it waits."""

    def __init__(self, clock: Clock, at: float, value: Any) -> None:
        super().__init__()
        self._clock, self._at = clock, at
        self.set_result(value)

    def done(self) -> bool:
        return self._clock.now >= self._at

    def result(self, timeout: float | None = None) -> Any:
        self._clock.until(self._at)
        return super().result(timeout)


class ModelledWorker:
    """The ranks' side of VAMP: levels, and one move at a time as ``runtime/memory/mover.py`` makes it."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.level = 0
        pages = model.max_level * model.layers
        memory = MemoryFigures(page_bytes=model.expert_bytes, home_pages={Tier.HOST.value: pages})
        self._report: Report | None = Report(capacity=self._capacity(), memory=memory)
        self._move: Move | None = None
        self._moves_since = self._moved_at = 0.0
        self._steps = self._tokens = 0

    def obey(self, output: Any, now: float, device_free_at: float) -> float:
        """Take over what the step brings; when the host goes on."""
        command = get_command(output)
        move = None if command is None else command.move
        idle = not output.total_num_scheduled_tokens
        now = self._finish(now, wait=idle or move is not None)
        if move is not None:
            # Leaving experts are read at home from this step on; those that read before must end first.
            self._move, self._moves_since = move, now
            self._moved_at = max(now, device_free_at) + move.levels * self.model.level_s
            if move.level_after > move.level_before:
                self.level = move.level_after
            now = self._finish(now, wait=idle)
        self._count(output.total_num_scheduled_tokens)
        return now

    def take_report(self) -> Report | None:
        report, self._report = self._report, None
        return report

    def _finish(self, now: float, wait: bool) -> float:
        move = self._move
        if move is None or (now < self._moved_at and not wait):
            return now
        now, self._move, self.level = max(now, self._moved_at), None, move.level_after
        size = move.levels * self.model.layers * self.model.expert_bytes
        pages_s, blocks = move.levels * self.model.level_s, self.model.blocks_at(self.level)
        outcome = Outcome(move.epoch, True, self.level, blocks, size, 0, now - self._moves_since, "", pages_s)
        self._add(outcome=outcome)
        return now

    def _count(self, tokens: int) -> None:
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        if self._steps == self.model.home_steps:
            hits = self._tokens / self._steps * np.array(self.model.inclusion())
            reads = (-np.expm1(-hits[: self.model.max_level])).cumsum()
            self._add(reads=LevelCounts((0.0, *map(float, reads)), self._steps))
            self._steps = self._tokens = 0

    def _add(self, **news: Any) -> None:
        self._report = replace(self._report or Report(), **news)

    def _capacity(self) -> Capacity:
        model = self.model
        return Capacity(
            blocks_at=tuple(model.blocks_at(level) for level in range(model.max_level + 1)),
            experts=model.experts,
            group=1,
            level_bytes=model.layers * model.expert_bytes,
            layers=model.layers,
            beside_steps=True,
        )


class ModelledExecutor(Executor):
    """Answers every step at once with the same token, and says when it would have ended.

    ``clock`` and ``model`` are the class's: vLLM makes the object.
    """

    clock: Clock
    model: StepModel = StepModel()
    supports_pp = True

    def _init_executor(self) -> None:
        self.region = False
        self._free_at = 0.0
        self._lengths: dict[str, int] = {}
        self._answer: Pending | None = None
        self.vamp = ModelledWorker(self.model) if settings.of(self.vllm_config) else None
        offloads = self.vllm_config.kv_transfer_config is not None
        rates = self.model.block_bytes, self.model.link, self.model.load_start_s
        self.copies = ModelledCopies(*rates) if offloads else None

    @property
    def max_concurrent_batches(self) -> int:
        return 2 if self.scheduler_config.async_scheduling else 1

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [kv_cache_specs(self.vllm_config)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["BLHNC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        self.cache_config.kv_cache_layout = layout_name

    def determine_available_memory(self) -> list[int]:
        return [self.cache_config.kv_cache_memory_bytes]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        now, before = self.clock.now, self._free_at
        if self.vamp is not None:
            now = self.vamp.obey(scheduler_output, now, before)
            self.clock.until(now)
        if self.copies is not None:
            now = self.copies.begin(scheduler_output.kv_connector_metadata, now)
            self.clock.until(now)
        prompt, decode, context, output = self._run(scheduler_output)
        level = self.vamp.level if self.vamp else 0
        if prompt + decode:
            seconds = self.model.step_s(prompt, decode, context, level, self.region and level > 0)
            self._free_at = max(now, before) + seconds
            if prompt:
                small = prompt + decode <= self.model.graph_tokens
                now += self.model.graph_launch_s if small else self.model.launch_s
                self.clock.until(now)
                self._free_at = max(self._free_at, now + self.model.behind_s)
        at = self._free_at
        if self.copies is not None:
            at = at if prompt + decode else self.copies.until(now)
            output.kv_connector_output = self.copies.ended(at)
        report = self.vamp.take_report() if self.vamp else None
        if report is not None:
            output = put_report(output, report)
        self._answer = Pending(self.clock, at, output)
        if prompt + decode:
            return Pending(self.clock, now, None) if non_block else None
        return self._answer if non_block else self._answer.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        answer, self._answer = self._answer, None
        assert answer is not None
        return answer if non_block else answer.result()

    def _run(self, output: Any) -> tuple[int, int, int, ModelRunnerOutput]:
        """Prompt and decode tokens, the context of the former, and the answer."""
        for request_id in output.finished_req_ids:
            self._lengths.pop(request_id, None)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self._lengths |= {new.req_id: len(new.prompt_token_ids) for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        prompt = decode = context = 0
        sampled: list[list[int]] = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            before, length = computed[request_id], self._lengths[request_id]
            if tokens == 1 and before + 1 >= length:
                decode += 1
            else:
                prompt += tokens
                context += tokens * before + tokens * tokens // 2
            ended = before + tokens >= length
            sampled.append([TOKEN] if ended else [])
            self._lengths[request_id] += ended
        ids = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(ids, {one: place for place, one in enumerate(ids)}, sampled)
        return prompt, decode, context, answer

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any
    ) -> list[Any]:
        if method == "get_supported_tasks":
            return [("generate",)]
        return [None]

    def check_health(self) -> None:
        pass

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True


def kv_cache_specs(config: Any) -> dict[str, KVCacheSpec]:
    """What the model's layers would ask for: attention in every fourth, gated delta nets in the others.

    Blocks hold as many tokens as make attention's page no smaller than the states', in steps of 16, as
    ``vllm/platforms/interface.py`` has it on a GPU; written into ``config`` likewise.
    """
    text, cache, dtype = config.model_config.hf_text_config, config.cache_config, torch.bfloat16
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        1,
        text.linear_num_key_heads,
        text.linear_num_value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
        0,
    )
    state_bytes = sum(prod(shape) for shape in shapes) * dtype.itemsize
    token_bytes = 2 * text.num_key_value_heads * text.head_dim * dtype.itemsize
    cache.block_size = cache.mamba_block_size = -(-state_bytes // (16 * token_bytes)) * 16
    cache.mamba_page_size_padded = cache.block_size * token_bytes
    attention = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=text.num_key_value_heads,
        head_size=text.head_dim,
        dtype=dtype,
    )
    states = MambaSpec(
        shapes=tuple(shapes),
        dtypes=(dtype, dtype),
        block_size=cache.mamba_block_size,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode=cache.mamba_cache_mode,
    )
    kinds = text.layer_types
    return {
        f"model.layers.{layer}": attention if kinds[layer] == "full_attention" else states
        for layer in range(text.num_hidden_layers)
    }
