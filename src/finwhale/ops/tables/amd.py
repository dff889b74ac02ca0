"""Operators on AMD GPUs: the references, until a kernel is measured to be faster."""

from finwhale.ops.tables.reference import OPS

__all__ = ["OPS"]
