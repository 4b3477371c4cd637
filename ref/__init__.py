"""The techniques, each in one file, written to be read from top to bottom beside the paper.

This room knows torch, einops, numpy, the standard library and, where a network is trained, `ref.model`. Every file
opens with its source, says where it departs from it, and translates the paper's symbols into its variables.
"""

from ref import bfloat16  # noqa: F401 – its products take torch's place where the processor has none
