"""Functions of tensors: records of what is to be computed, and the kernels that compute it."""

from ln_zoo.ops.records import RowNorm

__all__ = ["RowNorm"]
