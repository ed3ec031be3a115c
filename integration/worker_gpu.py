"""The GPU engine's worker with VAMP.

With asynchronous scheduling the step before may still be running when a command arrives: the boundary marks
the compute stream at the top of the step and waits for the mark before it unmaps anything.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from vamp_integration import graph_bypass
from vamp_integration.commands import Report, put_report
from vamp_integration.experts import VampRoutedExperts
from vamp_integration.worker import VampWorkerMixin
from vamp_runtime.controller import StepCommand
from vamp_runtime.memory.boundary import MoveKind


class ReportedOutput(AsyncModelRunnerOutput):
    """An output that is still being copied to the host, with a report to put on it."""

    def __init__(self, output: AsyncModelRunnerOutput, report: Report) -> None:
        self.output = output
        self.report = report

    def get_output(self) -> ModelRunnerOutput:
        return put_report(self.output.get_output(), self.report)


class VampGPUWorker(VampWorkerMixin, Worker):
    """``worker_cls`` of the GPU engine."""

    home_refresh_steps = 512  # steps are short here

    def determine_available_memory(self) -> int:
        """vLLM may capture graphs here already, to learn what they take, and measures what is left."""
        self._warm_up_own_kernel()
        return super().determine_available_memory()

    def compile_or_warm_up_model(self) -> Any:
        """Warm-up takes block ids below the number of blocks it finds: it must find those that are mapped."""
        config, mapped = self.model_runner.kv_cache_config, self.cache_config.num_gpu_blocks
        assert mapped is not None
        virtual, config.num_blocks = config.num_blocks, mapped
        try:
            times = super().compile_or_warm_up_model()
        finally:
            config.num_blocks = virtual
        staging = self._memory.staging
        manager = self.model_runner.cudagraph_manager  # type: ignore[attr-defined]
        if staging is not None and manager is not None:
            graph_bypass.install(manager, lambda: staging.needs_host_code)
        return times

    def _warm_up_own_kernel(self) -> None:
        """All layers have one shape, so one stands for them; must come before the first capture."""
        layers = (m for m in self.model_runner.get_model().modules() if isinstance(m, VampRoutedExperts))
        layer = next(layers)
        if layer.slot_kernel is not None:
            with torch.inference_mode():
                top_k = layer.moe_config.experts_per_token
                layer.slot_kernel.warm_up(self.scheduler_config.max_num_batched_tokens, top_k)

    def _obey(self, command: StepCommand | None, idle: bool) -> None:
        if command is not None and command.move is not None and command.move.kind is MoveKind.RESTORE:
            # Rows keep ids beyond their valid length, whose blocks will be gone. The step rewrites the rest.
            with torch.inference_mode():
                for table in self.model_runner.block_tables.input_block_tables:  # type: ignore[attr-defined]
                    table.zero_()
        super()._obey(command, idle)

    def _answer(self, output: Any) -> Any:
        if self._report is not None and isinstance(output, AsyncModelRunnerOutput):
            report, self._report = self._report, None
            return ReportedOutput(output, report)
        return super()._answer(output)
