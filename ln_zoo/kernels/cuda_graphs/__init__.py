"""Time steps as captured CUDA graphs."""
