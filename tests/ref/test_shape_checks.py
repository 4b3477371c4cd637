"""Tests check the shapes that `ref` declares: in the first calls of each test, and in a sample of the later ones."""

import torch
from jaxtyping import TypeCheckError

from ref.async_rl import truncated_ratios
from tests import shape_checks


def test_a_sample_of_the_calls_is_checked():
    def is_checked() -> bool:
        try:
            truncated_ratios(torch.zeros(3))  # one axis where [B, T] is declared
        except TypeCheckError:
            return True
        except ValueError:  # the function's own check
            return False

    calls = [is_checked() for _ in range(64)]
    assert calls == [call <= shape_checks.FIRST or call % shape_checks.EVERY == 0 for call in range(1, 65)]
    shape_checks.start_test()
    assert is_checked()
