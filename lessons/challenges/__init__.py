"""Challenges of the course: open problems with a score, and a board of committed solutions; `etude challenge`."""
