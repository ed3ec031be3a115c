"""Two ranks with a GPU each: what breaks on one of them, and scenarios with it (``support.engine``)."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from support.faulty import FaultyDriver
from support.scenarios import MIB, Rig, _one_by_one

REFUSED = ("map", "unmap", "set_access", "zero", "copy")


class Faults:
    """Worker extension (``--worker-extension-cls``): spawned ranks can be changed in no other way."""

    def seal_experts(self) -> None:
        self._memory.slab.seal()  # type: ignore[attr-defined]

    def verify_memory(self) -> int:
        """Every invariant that a rank sees alone, and the bytes of every expert; the level."""
        self._mover.rest()  # type: ignore[attr-defined]
        self._boundary.check_integrity()  # type: ignore[attr-defined]
        self._boundary.slab.verify_all()  # type: ignore[attr-defined]
        return int(self._boundary.slab.level)  # type: ignore[attr-defined]

    def refuse_calls(self, every: int) -> None:
        """On rank 1, the driver refuses one call in ``every``, which an undo must not reach."""
        if dist.get_rank() != 1:
            return
        driver = self._memory.driver  # type: ignore[attr-defined]
        own: Any = SimpleNamespace(**{name: getattr(driver, name) for name in REFUSED})
        faulty = FaultyDriver(own, every, REFUSED, mode="every")
        for name in REFUSED:
            setattr(driver, name, getattr(faulty, name))

    def lose_state(self, epoch: int) -> None:
        """On rank 1, the move of this epoch cannot be undone."""
        from vamp_runtime.errors import StateLost

        boundary = self._boundary  # type: ignore[attr-defined]
        request, prepare, asked = boundary.request, boundary.prepare, []

        def note(move: Any) -> str:
            asked.append(move.epoch)
            return str(request(move))

        def lose() -> bool:
            if dist.get_rank() == 1 and asked[-1] == epoch:
                raise StateLost("on purpose")
            return bool(prepare())

        boundary.request, boundary.prepare = note, lose


def ranks(
    model: str, work: dict[str, int], vamp: dict[str, Any], kv_mib: int, fault: str = "", **options: Any
) -> Any:
    """Prompts one by one on two GPUs; ``fault`` is "", "refused" or "lost", on rank 1 alone."""
    from vamp_integration import levels as levels_module

    rig = Rig(
        model,
        vamp={"max_offload_ratio": 0.5, "exercise_steps": 1, **vamp},
        kv_cache_memory_bytes=kv_mib * MIB,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls="support.two_gpus.Faults",
        **options,
    )
    rig.engine.collective_rpc("seal_experts")
    if fault == "refused":
        levels_module.RETRY_S = 0.0
        rig.engine.collective_rpc("refuse_calls", args=(61,))
    if fault == "lost":
        rig.engine.collective_rpc("lose_state", args=(5,))
    began = time.monotonic()
    try:
        results = _one_by_one(rig, **work)
        rig.settle()
        levels = rig.engine.collective_rpc("verify_memory")
    except Exception as error:  # whatever vLLM raises for a dead rank is the result here
        seconds = time.monotonic() - began
        return {"error": f"{type(error).__name__}: {error}", "seconds": seconds, **rig.report()}
    return {"results": results, "levels": levels, **rig.report()}
