"""`vamp doctor` on a machine with a GPU."""

from __future__ import annotations

import os

import pytest

from vamp_integration.doctor.checks import diagnose
from vamp_integration.doctor.probe import probe
from vamp_integration.plan import hardware_profile
from vamp_integration.settings import VampSettings
from vamp_runtime.memory.cuda_api import CudaApi

pytestmark = pytest.mark.gpu


def test_the_gpu_is_described_and_left_as_it_was() -> None:
    api = CudaApi(0)
    free_before, _ = api.call("cuMemGetInfo")
    facts = probe(0, os.environ)
    free_after, total = api.call("cuMemGetInfo")
    api.close()
    gpu = facts.gpu
    assert gpu is not None and facts.cuda_driver is not None, facts.gpu_missing
    assert gpu.trial == "" and gpu.vmm and gpu.host_vmm and gpu.total == total
    assert gpu.host_to_device is not None and gpu.host_to_device > 1e9
    assert free_before - free_after < 64 << 20, "what was tried is given back"
    print(gpu, facts.host, facts.numa)
    findings = diagnose(facts, hardware_profile(VampSettings(), "cuda"))
    hardware = [each for each in findings if each.check in ("GPU", "link", "host memory", "NUMA")]
    assert not [each for each in hardware if each.status == "problem"], hardware
