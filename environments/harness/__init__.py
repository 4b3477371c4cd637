"""The harness: tools as a model sees them, turns, budgets, summaries, transcripts."""
