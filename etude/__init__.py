"""etude: the shell around the techniques: catalogue, command line, run folders, report.

`catalog`, `runs` and `report` import no other room; `cli` is the front door and imports everything, lazily.
"""

__version__ = "0.1.0"
