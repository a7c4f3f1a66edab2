"""Kernels for CPUs, generated from the step of a cell and its norms."""
