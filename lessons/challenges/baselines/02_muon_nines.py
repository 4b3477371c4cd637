"""Three rounds of degree nine and one of degree five, all by Remez's exchange: more degree for the same products."""

import numpy as np


def fit_polynomial(low, high, terms):
    """Coefficients and error of the best odd polynomial with so many terms for the constant one on [low, high]."""
    powers = 1 + 2 * np.arange(terms)
    points = (low + high) / 2 - (high - low) / 2 * np.cos(np.pi * np.arange(terms + 1) / terms)
    grid = np.linspace(low, high, 8001)
    table = grid[:, None] ** powers
    coefficients = np.zeros(terms)
    for _ in range(60):
        signs = (-1.0) ** np.arange(terms + 1)
        coefficients = np.linalg.solve(
            np.concatenate([points[:, None] ** powers, signs[:, None]], 1), np.ones(terms + 1)
        )[:terms]
        miss = table @ coefficients - 1
        parts = np.split(np.arange(len(grid)), np.flatnonzero(np.diff(np.sign(miss))) + 1)
        if len(parts) != terms + 1:
            break
        points = grid[[part[np.abs(miss[part]).argmax()] for part in parts]]
    return coefficients.tolist(), float(np.abs(table @ coefficients - 1).max())


def rounds(products):
    low, high, polynomials = 0.002, 1.0, []
    for terms in [5, 5, 5, 3]:
        coefficients, error = fit_polynomial(low, high, terms)
        polynomials.append(coefficients)
        low, high = 1 - error, 1 + error
    return polynomials
