"""Recurrent kernels in C++, compiled on first use."""
