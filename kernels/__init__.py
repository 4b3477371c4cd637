"""Triton kernels with the signatures of the `ref` functions that they replace.

The folder does not know its own name, and its modules import each other relatively: in a checkout it is `kernels`,
installed it is `etude_kernels`. The `transformers` library looks for a package called `kernels`. It means the Hub's
distribution, which has `get_kernel`; this package does not imitate it. Other rooms get a module by
`scaled.runtime.engine.kernel`.
"""
