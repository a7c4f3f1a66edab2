"""Recurrent kernels in C++ for CPUs, compiled on first use."""
