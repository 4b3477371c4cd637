"""Experiments, a folder for each: `experiment.py` reproduces a figure or a claim of the sources with the reference
code. What several share stands beside them."""
