"""etude, the package on top of all others: catalogue, command line, full runs, figures, report, explorer.

`catalog` imports nothing; `cli` is the front door and imports everything, lazily.
"""

__version__ = "0.2.0"
