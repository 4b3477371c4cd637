"""Evaluations of a base model: codebase perplexity, state tracking, coding knowledge (Composer 2 report, Appendix
B)."""
