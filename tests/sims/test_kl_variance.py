"""The KL experiment plays, its quadrature agrees with the closed forms, and a wrong estimator would be found out."""

import json
import math

import numpy as np
import pytest
import torch

from ref import kl
from sims.kl_variance import experiment as kl_variance
from sims.kl_variance.experiment import Experiment


@pytest.mark.parametrize("divergence", [0.01, 0.3, 0.628, 1.5])
@pytest.mark.parametrize("kind", kl.KINDS)
def test_quadrature_gives_the_closed_forms(divergence, kind):
    m = math.sqrt(2 * divergence)
    mean, variance, fourth = kl_variance.moments(m, kind)
    assert (mean, variance) == pytest.approx(kl.gaussian_oracle(m)[kind], rel=1e-8)
    assert fourth >= variance**2


def test_the_fourth_moment_of_a_gaussian_is_three_variances_squared():
    _, variance, fourth = kl_variance.moments(0.7, "k1")
    assert fourth == pytest.approx(3 * variance**2, rel=1e-8)


def test_crossings_scatter_about_the_exact_root():
    found = kl_variance.crossings(Experiment(samples=2_000_000, batches=8))
    assert np.mean(found) == pytest.approx(kl.crossing(), abs=4 * np.std(found) / math.sqrt(len(found)) + 0.01)


def test_gradients_tell_right_from_wrong(monkeypatch):
    config = Experiment(pairs=2)
    found = kl_variance.gradients_of_one_token(config)
    assert max(found["k1 as loss, size"]) < 1e-12 and max(found["k2 as loss, from ∇KL(q‖p)"]) < 1e-12
    assert min(found["k3 as loss, from ∇KL(q‖p)"]) > 0.05
    # The signs of k1 turned round: the experiment has to see it.
    right = kl.token_kl
    monkeypatch.setattr(kl, "token_kl", lambda a, b, kind: -right(a, b, kind) if kind == "k1" else right(a, b, kind))
    assert min(kl_variance.gradients_of_one_token(config)["k1 in reward, from ∇KL(q‖p)"]) > 1.9


def test_the_sequence_gradient_by_another_road():
    """The gradient of the sequence's KL from its own definition over 81 words, with probabilities multiplied, not
    summed logs."""
    generator = torch.Generator().manual_seed(0 * 1000 + 700)
    logits, ref = torch.randn(2, 4, 4, 3, dtype=torch.float64, generator=generator)

    def divergence(logits):
        total = 0.0
        for word in np.ndindex(3, 3, 3, 3):
            q = p = torch.ones((), dtype=torch.float64)
            previous = 3
            for t, symbol in enumerate(word):
                q, p = q * logits[t, previous].softmax(-1)[symbol], p * ref[t, previous].softmax(-1)[symbol]
                previous = symbol
            total = total + q * (q / p).log()
        return total

    (right,) = torch.autograd.grad(divergence(logits.requires_grad_()), logits)
    words = torch.tensor(list(np.ndindex(3, 3, 3, 3)))
    previous = torch.cat((torch.full_like(words[:, :1], 3), words[:, :-1]), 1)
    logp, reference = (x.log_softmax(-1)[torch.arange(4), previous, words] for x in (logits, ref))
    paid = kl.token_kl(logp, reference, "k1").detach().sum(1)
    (got,) = torch.autograd.grad((logp.detach().sum(1).exp() * paid * logp.sum(1)).sum(), logits)
    assert torch.allclose(got, right, atol=1e-12)


def test_verdicts_of_a_quick_run(tmp_path, play_figure):
    record = play_figure("kl-variance", tmp_path)
    verdicts = {claim["name"]: claim["verdict"] for claim in record["claims"]}
    assert verdicts["k1-unbiased"] == verdicts["k3-loss"] == verdicts["off-policy"] == "holds"
    rows = (tmp_path / "kl-variance.csv").read_text().splitlines()
    assert len(rows) == len(record["rows"]) + 1 and (tmp_path / "kl-variance.png").stat().st_size > 20_000
    assert json.loads((tmp_path / "kl-variance.json").read_text())["quick"]
