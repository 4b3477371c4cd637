"""The techniques, each in one file, written to be read from top to bottom beside the paper.

This room knows torch, einops, numpy, the standard library and, where a network is trained, `ref.network.model`. Every technique
opens with its source, says where it departs from it, and translates the paper's symbols into its variables. What only serves them lies
beneath: the network (`network/`), the engine that plays it (`engine/`), small number formats (`formats.py`), the order of experts' rows
(`expert_rows.py`) and the checks of arguments (`checks.py`).
"""

from ref.network import bfloat16  # noqa: F401 – its products take torch's place where the processor has none
