"""The basis of `scaled/`: groups of ranks (`mesh.py`), communication (`comm.py`), which rank holds which part of a
batch (`cut.py`). Nothing here depends on a technique."""
