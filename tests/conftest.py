from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("hypothesis") is not None:  # a GPU machine runs tests without it
    from hypothesis import settings

    # A machine may be busy: how long an example takes says nothing about the code.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

pytest.register_assert_rewrite("support.driver_suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))
