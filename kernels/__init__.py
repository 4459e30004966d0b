"""Triton kernels of beam-moe. Empty on purpose: transformers probes a top-level package of this folder's name."""
