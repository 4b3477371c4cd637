"""Experiments, their records, and the claims that they support or contradict."""
