"""The report of a run: what its folder holds (`record.py`), drawn (`pictures.py`), as a page that stands alone (`page.py`)."""
