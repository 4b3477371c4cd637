"""The report of a run: reads its folder (`record.py`), draws pictures (`pictures.py`), writes a self-contained page
(`page.py`), with rollouts (`rollouts.py`)."""
