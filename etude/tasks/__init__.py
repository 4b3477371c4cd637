"""`etude tasks`: tasks from packages are made, tried, graded and served."""
