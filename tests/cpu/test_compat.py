from __future__ import annotations

from importlib import metadata

import pytest

from vamp_integration import compat
from vamp_runtime.errors import ConfigError


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.0+cpu", "0.32.1.post1"])
def test_releases_of_the_range_pass(version: str) -> None:
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.33.0rc1", "0.32.0rc2", "1.0", "dev", ""])
def test_any_other_version_is_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compat.check_version(version)
    message = str(caught.value)
    assert message.startswith(
        f"vLLM {version} is outside the supported range >=0.32,<0.33; install vllm==0.32.0"
    )
    assert "\n" not in message


@pytest.mark.parametrize("name", compat.DISTRIBUTIONS)
def test_both_distributions_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _only_installed(monkeypatch, {name: "0.32.5"})
    assert compat.installed_vllm() == "0.32.5"


def test_no_vllm_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _only_installed(monkeypatch, {})
    with pytest.raises(ConfigError, match=r"vLLM is not installed; install vllm==0\.32\.0"):
        compat.installed_vllm()


def _only_installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
