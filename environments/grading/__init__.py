"""Grading: what an agent left is laid onto a pristine tree, its tests are run apart, and only what that run says
privately counts."""
