"""Runs of techniques, small and full."""
