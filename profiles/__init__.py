"""Hardware, model and policy settings as TOML, and their loader."""

from __future__ import annotations

from vamp_profiles.loader import load_hardware, load_model, load_policy, shipped
from vamp_profiles.schema import HardwareProfile, ModelProfile, PolicyProfile, ProfileError, Quantity

__all__ = [
    "HardwareProfile",
    "ModelProfile",
    "PolicyProfile",
    "ProfileError",
    "Quantity",
    "load_hardware",
    "load_model",
    "load_policy",
    "shipped",
]
