"""Time steps on NVIDIA GPUs: one product and one Triton kernel per step, in CUDA graphs."""

from ln_zoo.kernels.triton.engine import TritonEngine

__all__ = ["TritonEngine"]
