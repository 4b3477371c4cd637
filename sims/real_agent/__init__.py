"""RL of a small language model on generated packages."""
