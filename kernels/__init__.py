"""Triton kernels with the signatures of the `ref` functions that they replace.

The `transformers` library looks for a package of this name. It means another distribution, which has `get_kernel`; this
package does not imitate it.
"""
