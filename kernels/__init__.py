"""Triton kernels behind the signatures of the `ref` functions that they replace.

The folder does not know its own name, and its modules import each other relatively: in a checkout it is `kernels`, installed it is
`etude_kernels`. The name `kernels` also belongs to the Hub's distribution with `get_kernel`, which `transformers` probes for. Nothing here
pretends to be it. Other rooms get a module by `scaled.runtime.engine.kernel`.
"""
