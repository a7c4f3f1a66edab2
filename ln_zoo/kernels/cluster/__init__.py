"""Persistent kernels for thread-block clusters (Hopper GPUs): one launch per sequence."""
