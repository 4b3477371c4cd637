"""Tasks in Harbor's format, and the grader that goes with them."""
