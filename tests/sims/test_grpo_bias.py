"""Groups are enumerated rightly, gradients agree with brute force over ordered groups, and a wrong loss would be found
out."""

import itertools
import json

import pytest
import torch

from ref.dr_grpo import FAMILY, Variant, family_loss
from sims import words
from sims.grpo_bias import experiment as grpo_bias
from sims.grpo_bias.experiment import TRAINED, Experiment, compare, expected_gradient, true_gradient
from sims.words import PROMPTS, Groups, World

LETTERS, LENGTH, PRICE = 2, 2, 0.1
RIGHT = {
    0: lambda w: 2 in w,
    1: lambda w: 2 in w and 0 in w,
    2: lambda w: False,
}  # two letters and an end do not fit in two


def brute(logits, variant, size, by_tokens=False):
    """Minus the expected gradient of `family_loss`, over every ordered group of words, with probabilities
    multiplied."""
    vocabulary = [(2,), (0, 2), (1, 2), (0, 0), (0, 1), (1, 0), (1, 1)]
    objective, length = torch.zeros(()).double(), 0.0
    for prompt in range(PROMPTS):
        table = logits[0, prompt].log_softmax(-1)
        logp = [torch.stack([table[t, 2 if t == 0 else w[t - 1], w[t]] for t in range(len(w))]) for w in vocabulary]
        length += sum(x.sum().exp().item() * len(x) for x in logp)
        for group in itertools.product(range(7), repeat=size):
            chance = torch.stack([logp[i].sum() for i in group]).sum().exp().item()
            rows = torch.stack([torch.nn.functional.pad(logp[i], (0, 2 - len(logp[i]))) for i in group])
            mask = torch.tensor([[True] * len(vocabulary[i]) + [False] * (2 - len(vocabulary[i])) for i in group])
            rewards = torch.tensor(
                [[RIGHT[prompt](vocabulary[i]) - PRICE * len(vocabulary[i]) for i in group]]
            ).double()
            options = {"budget": mask.sum().item() if by_tokens else size}
            options["finished"] = torch.tensor([2 in vocabulary[i] for i in group])
            loss = family_loss(variant, rows, rows.detach(), rewards, mask, **options)
            objective = objective - chance / PROMPTS * loss
    (total,) = torch.autograd.grad(objective, logits, retain_graph=True)
    if by_tokens:
        total = total * length / PROMPTS
    return total


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "gspo", "only length", "only std", "masked"])
def test_expected_gradient_is_that_of_all_ordered_groups(name):
    world = World(LETTERS, LENGTH)
    logits = world.policies(1, 3).requires_grad_()
    groups = [Groups(world, prompt, 2, PRICE) for prompt in range(PROMPTS)]
    right = brute(logits, TRAINED[name], 2, by_tokens=name == "dapo")
    assert torch.allclose(expected_gradient(world, logits, name, groups), right, atol=1e-12)


def test_what_turns_dapo_is_its_masking():
    rows, _ = grpo_bias.gradients(Experiment(length=4, policies=8, group_sizes=(4,)))
    found = {row["member"]: row for row in rows if not row["price"]}
    assert found["only std"]["sine"] < 0.15 < 0.3 < found["masked"]["sine"]
    assert abs(found["dapo"]["sine"] - found["masked"]["sine"]) < 0.1
    assert found["masked"]["grows wrong"] > 1.2 * found["truth"]["grows wrong"]


def test_chances_of_words_and_of_groups_add_up_to_one():
    world = World(3, 4)
    q = world.logp(world.policies(2, 0)).exp()
    assert torch.allclose(q.sum(2), torch.ones(2, PROMPTS).double())
    for prompt in range(PROMPTS):
        assert torch.allclose(Groups(world, prompt, 4, 0.0).chances(q[:, prompt])[1].sum(1), torch.ones(2).double())


def test_uniform_policy_by_hand():
    """Letters 0, 1 and an end, at most two symbols: seven words; all logits equal."""
    world = World(LETTERS, LENGTH)
    now = world.measure(torch.zeros(1, PROMPTS, 2, 3, 3).double())
    assert now["cut"].item() == pytest.approx(4 / 9) and now["length"].item() == pytest.approx(1 / 3 + 2 * 2 / 3)
    assert now["reward"].item() == pytest.approx((5 / 9 + 1 / 9 + 0) / 3)


def test_true_gradient_is_the_slope_of_the_expected_reward():
    world, price = World(2, 3), 0.05
    logits, along = world.policies(2, 5)

    def reward(logits):
        return ((world.logp(logits[None]).exp() * world.reward(price)).sum() / PROMPTS).item()

    slope = (reward(logits + 1e-5 * along) - reward(logits - 1e-5 * along)) / 2e-5
    assert (true_gradient(world, logits[None], price)[0] * along).sum().item() == pytest.approx(slope, rel=1e-7)


def test_comparison_by_hand():
    got = compare(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[1.0, 0.0]]]))
    assert {k: v.item() for k, v in got.items()} == pytest.approx(
        {"cosine": 0.6, "norm": 5, "distance": 20**0.5, "sine": 0.8}
    )


def test_a_wrong_baseline_is_found_out(monkeypatch):
    """The exact claims must notice a Dr. GRPO whose weights are divided by the length, and one of the wrong sign."""
    config = Experiment(length=3, policies=2, group_sizes=(3,))
    largest = lambda: max(grpo_bias.gradients(config)[1]["from (N-1)/N, dr_grpo, 3, 0"])  # noqa: E731
    assert largest() < 1e-12
    monkeypatch.setitem(grpo_bias.TRAINED, "dr_grpo", Variant(length="rollout"))
    assert largest() > 0.1
    monkeypatch.setitem(grpo_bias.TRAINED, "dr_grpo", FAMILY["dr_grpo"])
    right = words.family_loss
    monkeypatch.setattr(words, "family_loss", lambda *a, **k: -right(*a, **k))
    assert largest() > 1


def test_advantages_of_a_group_that_is_all_right():
    """N = 2 by hand: |A| is half the price times the difference in length, 1/√2 once divided; so is a half-right
    group's."""
    rows = grpo_bias.equally_right(Experiment(letters=2, length=2, policies=3, group_sizes=(2,), prices=(0.01, 0.02)))
    by = {(row["scale"], row["price"]): row["size"] for row in rows}
    assert by["none", 0.02] == pytest.approx(2 * by["none", 0.01], rel=1e-9)
    world = World(2, 2)
    q = world.logp(world.policies(3, 0)).exp()[:, 0] * world.right[0]
    one = q[:, world.length == 1].sum(1) / q.sum(1)
    differ = (2 * one * (1 - one)).sqrt()  # root of the chance that one of two is longer
    assert by["none", 0.01] == pytest.approx((differ * 0.01 / 2).mean().item() / 0.5, rel=1e-9)
    assert by["std", 0.01] == pytest.approx(differ.mean().item(), rel=1e-3)


def test_verdicts_of_a_quick_run(tmp_path, play_figure):
    record = play_figure("grpo-bias", tmp_path)
    verdicts = {claim["name"]: claim["verdict"] for claim in record["claims"]}
    assert {verdicts[name] for name in ("mean-factor", "rloo-exact", "mean-against-others", "std-blow-up")} == {"holds"}
    rows = (tmp_path / "grpo-bias.csv").read_text().splitlines()
    assert len(rows) == len(record["rows"]) + 1 and (tmp_path / "grpo-bias.png").stat().st_size > 20_000
    assert json.loads((tmp_path / "grpo-bias.json").read_text())["quick"]
    # GSPO is GRPO where the ratio is one; Dr. GRPO and RLOO part by Adam's eps alone.
    last = {row["member"]: row for row in record["rows"] if row["part"] == "training"}
    assert last["gspo"]["reward"] == pytest.approx(last["grpo"]["reward"], abs=1e-9)
    assert last["rloo"]["reward"] == pytest.approx(last["dr_grpo"]["reward"], abs=1e-3)
