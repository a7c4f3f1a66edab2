"""Persistent kernels for thread-block clusters (Hopper GPUs): a sequence runs in one launch."""
