"""The KV cache's layout is chosen in the environment for engines with VAMP, and for no other."""

from __future__ import annotations

import os

import pytest
from vllm.platforms import current_platform

from vamp_integration.engine_args import LAYOUT, _Layout
from vamp_integration.settings import GPU_LAYOUT
from vamp_runtime.errors import ConfigError

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.delenv(LAYOUT, raising=False)


def test_it_stays_for_the_engine_and_goes_before_one_without_vamp() -> None:
    layout = _Layout()
    with layout.chosen():
        assert os.environ[LAYOUT] == GPU_LAYOUT
    assert os.environ[LAYOUT] == GPU_LAYOUT
    with layout.chosen():  # a second engine
        pass
    layout.put_back()
    assert LAYOUT not in os.environ


def test_a_refused_configuration_leaves_the_environment_as_it_was() -> None:
    layout = _Layout()
    with pytest.raises(ConfigError, match="wrong"), layout.chosen():
        raise ConfigError("wrong")
    assert LAYOUT not in os.environ


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = _Layout()
    monkeypatch.setenv(LAYOUT, GPU_LAYOUT)
    with layout.chosen():
        pass
    layout.put_back()
    assert os.environ[LAYOUT] == GPU_LAYOUT
    monkeypatch.setenv(LAYOUT, "NHD")
    with (
        pytest.raises(ConfigError, match=f"{LAYOUT}: NHD has several tails; unset it, or use"),
        layout.chosen(),
    ):
        raise AssertionError("not reached")
    assert os.environ[LAYOUT] == "NHD"


def test_nothing_is_set_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    with _Layout().chosen():
        assert LAYOUT not in os.environ
