"""Thin adapters that put beam-moe's kernels underneath engines and trainers."""
