"""The explorer: one page per technique of the recipe, with its formula, controls, a picture that reacts to them, and
the code that drew it.

    etude explore        the same as: streamlit run app.py

Each page is one file in `etude/explorer/pages/`. Everything it computes is a call into `ref/`, `recipe/` or `sims/`.
"""

from etude.explorer import start

start()
