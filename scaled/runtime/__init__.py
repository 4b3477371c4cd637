"""What all of `scaled/` stands on: which ranks belong together (`mesh.py`), what they say to each other (`comm.py`), who holds which
part of a batch (`cut.py`). Nothing here knows a technique."""
