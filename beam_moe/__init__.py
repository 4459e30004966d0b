"""beam-moe: kernels and integrations for reinforcement learning on sparse mixture-of-experts models."""

__version__ = "0.1.0"
