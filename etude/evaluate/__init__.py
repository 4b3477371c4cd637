"""`etude eval`: agents on held-out tasks, and base models."""
