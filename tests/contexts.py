"""A tiny mixture of experts and contexts that it might have sampled: what the tests of a step of RL play on, on one
rank and on many."""

import torch

from ref.network import Config, Transformer
from ref.self_summary import Segment
from ref.textual_feedback import Hint

__all__ = ["CONFIG", "LENGTH", "hints", "network", "policy", "segment"]

CONFIG = Config.tiny(
    30,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)
LENGTH = 24


def network(seed: int) -> dict:
    """Weights by name, float64."""
    torch.manual_seed(seed)
    # Far from where it began: log-probs, ratios and routers that matter.
    return {name: 3 * p.detach().double() for name, p in Transformer(CONFIG).named_parameters()}


def policy(state: dict) -> Transformer:
    """The network with these weights."""
    model = Transformer(CONFIG).double()
    model.load_state_dict(state)
    return model


def segment(g: torch.Generator, model: Transformer) -> Segment:
    """A context of 2 to LENGTH tokens, some of them the policy's; behaviour near that of `model`, so that not every
    ratio is clipped."""
    T = int(torch.randint(2, LENGTH + 1, (), generator=g))
    tokens = torch.randint(0, 30, (T,), generator=g)
    sampled = torch.rand(T, generator=g) < 0.6
    sampled[0], sampled[-1] = False, True
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].log_softmax(-1)
    own = logits[:-1].gather(1, tokens[1:, None])[:, 0] + 0.2 * torch.randn(T - 1, generator=g, dtype=torch.float64)
    logp = torch.cat((torch.zeros(1, dtype=torch.float64), own.clamp(max=0))).where(sampled, 0)
    experts = torch.rand(T - 1, 2, 4, generator=g).argsort(-1)[..., :2].to(torch.int16)
    return Segment(
        tokens, sampled, logp, torch.zeros(T, dtype=torch.long), experts, True, summary=torch.zeros(T, dtype=torch.bool)
    )


def hints(g: torch.Generator, one: Segment) -> list[Hint]:
    """Hints of 0 to 3 tokens in front of some of its messages, each of which is a run of the policy's tokens."""
    own, found = one.sampled.tolist(), []
    for begin in range(1, len(own)):
        if own[begin] and not own[begin - 1] and bool(torch.rand((), generator=g) < 0.5):
            end = next((t for t in range(begin, len(own)) if not own[t]), len(own))
            words = torch.randint(0, 30, (int(torch.randint(0, 4, (), generator=g)),), generator=g)
            found.append(Hint(begin, tuple(words.tolist()), begin, end))
    return found
