"""Tensor-parallel collectives with deadlines; `base` is the seam, `shm` the implementation for ranks of one machine."""
