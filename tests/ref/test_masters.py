"""Master weights: what the optimisers see, what is rounded down, that small steps add up, and what a gradient without a
number leaves."""

import copy
import math

import pytest
import torch
from torch import nn

from ref.network.masters import Masters


class Network(nn.Module):
    """Two matrices and a vector; one of the matrices can be left out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.gain = (
            nn.Linear(6, 5, bias=False),
            nn.Linear(6, 5, bias=False),
            nn.Parameter(torch.ones(5)),
        )

    def forward(self, x, both=True):
        return self.gain * (self.first(x) + (self.second(x) if both else 0))


def backward(model, seed=0, both=True, size=1.0):
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed))
    (size * model(x.to(model.gain.dtype), both).square().sum()).backward()


def adamw(module, lr=0.01):
    return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_steps_are_those_of_float32_weights_on_gradients_of_rounded_ones(dtype):
    """Beside a loop that keeps float32 weights and rounds them anew for every forward pass: the same bits."""
    plain = Network()
    masters = Masters(copy.deepcopy(plain), dtype)
    mine, theirs = adamw(masters.masters), adamw(plain)
    for step in range(4):
        backward(masters.model, step)
        work = copy.deepcopy(plain).to(dtype)
        backward(work, step)
        for p, w in zip(plain.parameters(), work.parameters(), strict=True):
            p.grad = w.grad.float()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        norm = masters.step([mine], max_norm=0.5)
        assert torch.equal(norm, wanted) and norm > 0.5, "the norm is the one before clipping"
        for p, master, w in zip(
            plain.parameters(), masters.masters.parameters(), masters.model.parameters(), strict=True
        ):
            assert master.dtype == torch.float32 and w.dtype == dtype
            assert torch.equal(master, p) and torch.equal(w, p.to(dtype))


def test_a_gradient_within_the_bound_is_taken_as_it_is_and_one_beyond_is_shrunk_to_it():
    for bound, moved in ((100.0, 5.0), (1.0, 1.0)):
        masters = Masters(nn.Linear(1, 2, bias=False))
        before = masters.masters.weight.detach().clone()
        masters.model.weight.grad = torch.tensor([[3.0], [4.0]]).bfloat16()
        assert masters.step([torch.optim.SGD(masters.masters.parameters(), lr=1.0)], max_norm=bound) == 5
        assert (masters.masters.weight - before).norm().item() == pytest.approx(moved, rel=1e-5)


def test_steps_too_small_for_bfloat16_add_up_in_the_masters():
    """1e-5 at 1.0 is a 390th of bfloat16's step there: alone, such a step changes nothing, 200 of them move the weight
    by half a step up."""
    masters = Masters(nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        masters.masters.weight.fill_(1.0)
    masters.copy_down()
    optimiser = torch.optim.SGD(masters.masters.parameters(), lr=1e-5)
    seen = []
    for _ in range(450):
        masters.model.weight.grad = torch.full((1, 1), -1.0).bfloat16()
        masters.step([optimiser])
        seen.append(masters.model.weight.item())
    assert seen[0] == 1.0 and seen[-1] == 1.0078125 and masters.masters.weight.item() == pytest.approx(1.0045, abs=1e-5)
    assert seen == sorted(seen) and len(set(seen)) == 2


def test_gradients_are_cleared_and_what_has_none_stays():
    masters = Masters(Network())
    optimiser, before = adamw(masters.masters), copy.deepcopy(masters.masters)
    backward(masters.model)
    masters.step([optimiser])
    assert all(p.grad is None for module in (masters.model, masters.masters) for p in module.parameters())
    once = copy.deepcopy(masters.masters)
    backward(masters.model, both=False)
    masters.step([optimiser])
    assert not torch.equal(before.second.weight, once.second.weight)
    assert torch.equal(masters.masters.second.weight, once.second.weight), "neither a gradient nor decay"
    assert not torch.equal(masters.masters.first.weight, once.first.weight)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_raises_and_leaves_everything_as_it_was(wrong):
    """Masters, weights, the optimiser's state; and the next step knows nothing of it, also of a parameter that it does
    not use."""
    masters = Masters(Network())
    optimiser = adamw(masters.masters)
    other = copy.deepcopy(masters)
    twin = adamw(other.masters)
    backward(masters.model)
    masters.model.second.weight.grad[0, 0] = wrong
    with pytest.raises(FloatingPointError, match="the step was not taken"):
        masters.step([optimiser])
    assert not optimiser.state
    for one, steps in ((masters, optimiser), (other, twin)):
        backward(one.model, both=False)
        one.step([steps])
    for module, same in ((masters.masters, other.masters), (masters.model, other.model)):
        for p, q in zip(module.parameters(), same.parameters(), strict=True):
            assert torch.equal(p, q)


def test_masters_have_the_networks_names_and_a_loaded_state_is_copied_down():
    network, other = Network(), Network()
    masters = Masters(network)
    assert masters.masters is network and list(network.state_dict()) == list(masters.model.state_dict())
    masters.masters.load_state_dict(other.state_dict())
    assert not torch.equal(masters.model.first.weight, other.first.weight.bfloat16())
    masters.copy_down()
    for p, q in zip(masters.model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q.bfloat16())


def test_gradients_gathered_elsewhere_count_instead_of_the_models_own():
    """Without rounding them to the working weights' dtype; a parameter without one stays."""
    masters = Masters(nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]))
    first, second = (p.detach().clone() for p in masters.masters.parameters())
    masters.model[1].weight.grad = torch.ones(1, 1).bfloat16()  # left behind
    gradient = torch.tensor([[0.25 + 2.0**-12]])
    norm = masters.step([torch.optim.SGD(masters.masters.parameters(), lr=1.0)], gradients=[gradient, None])
    assert norm == gradient.item() and torch.equal(masters.masters[1].weight, second)
    torch.testing.assert_close(masters.masters[0].weight, first - gradient, rtol=0, atol=1e-7)
    assert all(p.grad is None for p in [*masters.model.parameters(), *masters.masters.parameters()])
    with pytest.raises(ValueError, match="shorter"):
        masters.step([], gradients=[gradient])
