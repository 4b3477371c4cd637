"""The explorer: the recipe's techniques as pages, each with its formula, its controls, a picture that moves, and the code that
made it.

    etude explore        the same as: streamlit run app.py

Pages lie in `etude/explorer/`, one file each. All that they compute is a call into `ref/` or `sims/`.
"""

from etude.explorer import start

start()
