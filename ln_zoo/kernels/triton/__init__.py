"""Time steps on NVIDIA GPUs: one product and one Triton kernel per step, in CUDA graphs."""
