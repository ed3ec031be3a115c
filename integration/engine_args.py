"""Hook: ``vllm/engine/arg_utils.py`` ``EngineArgs.create_engine_config`` in the front-end process.

What: where the load format is ``vamp``, worker and scheduler class are filled in and the configuration is
checked. Why: a load format alone cannot choose them, and three flags that must agree are two too many.
How: wraps the method once (marked). It goes when vLLM lets a plugin complete an engine configuration.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vamp_integration import refusals, settings
from vamp_integration.home_room import check_homes
from vamp_integration.peer_room import check_visible
from vamp_integration.plan import check_plan
from vamp_runtime.errors import ConfigError

CPU_WORKER = "vamp_integration.worker_cpu.VampCPUWorker"
GPU_WORKER = "vamp_integration.worker_gpu.VampGPUWorker"
SCHEDULER = "vamp_integration.scheduler.VampScheduler"
ASYNC_SCHEDULER = "vamp_integration.scheduler.VampAsyncScheduler"
LAYOUT = "VLLM_KV_CACHE_LAYOUT"


def install() -> None:
    """Wrap ``EngineArgs.create_engine_config``; calling it again changes nothing."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "vamp_wrapped", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(self.load_format).lower() != settings.LOAD_FORMAT:
            _layout.put_back()
            return original(self, *args, **kwargs)
        chosen = settings.given(self.additional_config)  # a wrong one is refused before anything else
        _fill_worker(self)
        _export_metrics()
        with _layout.chosen():
            config = original(self, *args, **kwargs)
            config.scheduler_config.scheduler_cls = _scheduler(config)
            _choose_experts(config)
            refusals.check_engine(config)
            _check_files_and_sizes(settings.settled(chosen, config), config)
        return config

    create_engine_config.vamp_wrapped = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def _check_files_and_sizes(chosen: settings.VampSettings, config: Any) -> None:
    """Profiles can be read, pages divide, homes fit: found here, it costs one line and not a start-up."""
    geometry = check_plan(
        chosen,
        config.model_config.hf_text_config,
        config.parallel_config.tensor_parallel_size,
        config.cache_config.kv_cache_memory_bytes,
        config.device_config.device_type,
        config.model_config.quantization,
    )
    if geometry is not None:
        beside = _host_kv_bytes(config.kv_transfer_config)
        check_homes(chosen, geometry, config.parallel_config.local_world_size, beside=beside)
        if geometry.peer_homes:
            check_visible(chosen, geometry, _visible_gpus())


def _host_kv_bytes(transfer: Any) -> int:
    """Host memory of all ranks that vLLM's KV offloading takes at start."""
    if transfer is None or transfer.kv_connector is None:
        return 0
    return int(transfer.kv_connector_extra_config.get("cpu_bytes_to_use") or 0)


def _visible_gpus() -> int:
    from vllm.platforms import current_platform

    return int(current_platform.device_count())  # asks NVML: CUDA must not start in this process


def _fill_worker(args: Any) -> None:
    """Set the worker's class, and refuse those that would replace ours."""
    from vllm.platforms import current_platform

    worker = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
    if args.worker_cls not in ("auto", worker):
        raise ConfigError(f"worker_cls: {args.worker_cls} replaces VAMP's own; leave worker_cls unset")
    args.worker_cls = worker
    scheduler = args.scheduler_cls
    if scheduler not in (None, SCHEDULER, ASYNC_SCHEDULER):
        raise ConfigError(f"scheduler_cls: {scheduler} replaces VAMP's own; leave scheduler_cls unset")


def _export_metrics() -> None:
    from vamp_integration import stat_logger

    stat_logger.install()


def _scheduler(config: Any) -> str:
    """The scheduler's class; vLLM decides late whether scheduling is asynchronous."""
    return ASYNC_SCHEDULER if config.scheduler_config.async_scheduling else SCHEDULER


def _choose_experts(config: Any) -> None:
    """Triton experts take their weights as they lie; left to itself, vLLM takes others on some GPUs."""
    if config.device_config.device_type != "cpu" and config.kernel_config.moe_backend == "auto":
        config.kernel_config.moe_backend = "triton"


class _Layout:
    """vLLM reads the layout from its environment, in the engine's process, which inherits this one's.

    What has been set for an engine stays set, until one without VAMP is configured in this process.
    """

    def __init__(self) -> None:
        self._ours = False

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Inside and, unless that fails, afterwards, the layout is the one with a single tail.

        Raises:
            ConfigError: another has been asked for.
        """
        from vllm.platforms import current_platform

        given = os.environ.get(LAYOUT)
        if current_platform.is_cpu() or given == settings.GPU_LAYOUT:
            yield
            return
        if given is not None:
            raise ConfigError(f"{LAYOUT}: {given} has several tails; unset it, or use {settings.GPU_LAYOUT}")
        os.environ[LAYOUT], self._ours = settings.GPU_LAYOUT, True
        try:
            yield
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        if self._ours:
            os.environ.pop(LAYOUT, None)
            self._ours = False


_layout = _Layout()
