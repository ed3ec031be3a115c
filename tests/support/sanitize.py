"""Moves under compute-sanitizer: experts of bare slabs, then an engine's tokens with moves and without.

On a machine with a GPU, with the package installed::

    PYTHONPATH=tests compute-sanitizer --tool memcheck --target-processes all python -m support.sanitize

``--moves N`` moves of each slab; ``--kernel vllm`` for vLLM's. What differs from what it should be ends it
with an exception; what the sanitizer finds it reports itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

KV_MIB = 96
WORK = {"seed": 1, "count": 3, "length": 200}
MAX_TOKENS = 16
LEAST_MOVES = 20


def check_slabs(moves: int) -> None:
    """Every byte of every expert after each of ``moves`` moves, in every shape of slab."""
    from support.hashed_moves import move_and_compare
    from support.rigs import SHAPES, build_rig
    from vamp_runtime.memory.cuda import CudaDriver

    for shape in SHAPES:
        driver = CudaDriver(0)
        move_and_compare(build_rig(driver, shape), torch.device("cuda", 0), moves)
        torch.cuda.synchronize()
        driver.close()
        print(f"slab {shape.name}: {moves} moves, every byte as it was", flush=True)


def check_engine(kernel: str, **options: Any) -> None:
    """Greedy tokens of one engine, first without moves, then with one in every step."""
    from support.scenarios import MIB, Rig, prompts
    from support.small_model import write_small

    with tempfile.TemporaryDirectory() as folder:
        model = write_small(Path(folder))
        vamp = {"max_offload_ratio": 0.5, "moe_kernel": kernel}
        options = {"kv_cache_memory_bytes": KV_MIB * MIB, "enable_prefix_caching": False, **options}
        rig = Rig(str(model), vamp=vamp, **options)

    def tokens() -> list[Any]:
        return [rig.generate([prompt], MAX_TOKENS)[0]["tokens"] for prompt in prompts(**WORK)]

    still = tokens()
    assert rig.report()["moves"] == 0
    print(f"engine: {len(still)} requests without moves", flush=True)
    shrinker = rig.scheduler.shrinker
    shrinker.settings = dataclasses.replace(shrinker.settings, exercise_steps=1)
    for _ in range(4):
        assert tokens() == still
        if rig.report()["moves"] >= LEAST_MOVES:
            break
    rig.settle()
    rig.check()
    report = rig.report()
    assert report["moves"] >= LEAST_MOVES and report["failed_moves"] == 0, report
    print(f"engine: {report['moves']} moves, {report['bytes_moved'] >> 20} MiB, tokens as before", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--moves", type=int, default=40)
    parser.add_argument("--kernel", choices=("vamp", "vllm"), default="vamp")
    given = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    check_slabs(given.moves)
    graphs = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2]}}
    check_engine(given.kernel, gdn_prefill_backend="triton", **graphs)


if __name__ == "__main__":
    main()
