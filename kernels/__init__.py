"""Tensors in, tensors out: one reference and one fast twin per operation."""
