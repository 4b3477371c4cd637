"""The techniques, one per file, each written to be read from top to bottom next to its paper.

Techniques use torch, einops, numpy, the standard library and, if they train a network, `ref.network.model`. Every
technique starts with its source, says where it departs from it, and maps the paper's symbols to its variables. The
other files support them: the network (`network/`), the engine that runs it (`engine/`), small number formats
(`formats.py`), sorting rows by expert (`expert_rows.py`) and checks of arguments (`checks.py`). What needs no torch,
such as feature deletion, does not wait for it.
"""
