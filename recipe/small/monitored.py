"""What is watched for beside RL. A report reads it as well, and needs no torch: nothing is imported here."""

__all__ = ["NAMES", "SIDES"]

SIDES = {
    "entropy": "down",
    "top_tool": "up",
    "comments": "up",
    "length": "both",
    "broken": "up",
    "questions": "up",
    "hacks": "up",
}
"""Which way a statistic is watched."""
NAMES = {
    "entropy": "variety of tools",
    "top_tool": "share of the tool called most",
    "comments": "comments in written code",
    "length": "length of rollouts",
    "broken": "broken calls",
    "questions": "questions instead of work",
    "hacks": "signs of a hack",
}
"""What a statistic is called where people read it."""
