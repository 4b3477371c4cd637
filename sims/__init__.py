"""Simulations: each module reproduces one figure or one claim with the reference code."""
