"""Challenge 2: fifteen products that end closest to one.

Muon multiplies a matrix five times by the same polynomial, X ← (a + bA + cA²)X with A = XXᵀ, and leaves singular values
between 0.68 and 1.20. It takes three matrix products a round, fifteen in all. Nobody says that all rounds must be the
same, nor that each must have three coefficients.

rounds(products): return a list of rounds, each a list of coefficients [a, b, …] of 1, A, A², …, in the order in which
they are used. A round of 2, 3, 4, 5, 6 or 7 coefficients costs 2, 3, 4, 4, 5 or 5 products (A² serves twice), and all
may cost `products`, which is 15.

Score: the largest |σ − 1| over all singular values from 0.002 to 1. Less is better. The same rounds are also played on
a matrix in float32, and must be stable there.
"""


def rounds(products):
    """Keller Jordan's coefficients, in every round."""
    return [[3.4445, -4.7750, 2.0315]] * (products // 3)
