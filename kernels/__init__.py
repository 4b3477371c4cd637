"""Triton kernels behind the signatures of the `ref` functions that they replace.

The `transformers` library probes for a package of this name; `get_kernel` and its like live in another distribution,
and nothing here pretends to be it.
"""
