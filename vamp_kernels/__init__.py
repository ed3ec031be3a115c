"""Triton kernels for the routed part of an MoE layer, their launch choices and torch references."""
