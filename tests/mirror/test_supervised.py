"""The supervised stages of the full recipe: each trains what the small recipe's stage trains, on any number of
ranks."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.full.settings import Cluster, FullRecipe
from recipe.small import learner
from recipe.small.learner import RATES, Learner
from recipe.small.settings import Mtp, Sft, Training
from ref.cpt import next_token_loss
from ref.mtp import MTP, MTPConfig, mtp_loss
from ref.network import Config, Transformer
from scaled.supervised import counts
from tests.mirror import calls
from tests.mirror.layouts import close
from tests.mirror.workers import ranks

CONFIG = Config.tiny(
    40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    moe_intermediate_size=8,
)
STEPS, T = 3, 16
LAYOUTS = [dict(dp=1, cp=1, ep=1), dict(dp=2, cp=1, ep=2), dict(dp=1, cp=2, ep=1), dict(dp=2, cp=2, ep=4)]
STAGES = [("cpt", True), ("mtp", True), ("long", True), ("long", False), ("sft", True), ("sft", False)]


class Silent:
    """A stage of a run that begins anew and keeps what is logged."""

    def __init__(self):
        self.lines: list[dict] = []

    def restore(self) -> None:
        return None

    def log(self, step: int, **metrics: float) -> None:
        self.lines.append(metrics)

    def progress(self, *_: object, **__: object) -> None:
        return None

    def due(self) -> bool:
        return False


def settings_of(detach: bool, micro_rows: int = 4) -> FullRecipe:
    """Float64, which the dataclass does not check; schedules that differ from step to step."""
    return replace(
        FullRecipe.rehearsal(),
        training=Training(dtype="float64", muon_lr=0.01),  # type: ignore[arg-type]
        mtp=Mtp(layers=MTPConfig(depth=2, intermediate_size=12), weight=0.7, detach_trunk=detach, muon_lr=0.03),
        sft=Sft(muon_lr=0.004, adamw_lr=2e-3),
        cluster=Cluster(cp=1, long_cp=1, rl_cp=1, ep=1, micro_rows=micro_rows, rematerialise=False),
    )


@pytest.fixture(scope="module")
def start():
    """Weights of network and layers, and the batches: packed documents with padding, for SFT with weights."""
    torch.manual_seed(0)
    config = replace(CONFIG, initializer_range=0.3)
    trunk, layers = Transformer(config).double(), MTP(config, MTPConfig(depth=2, intermediate_size=12)).double()
    draw, batches = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        doc = (torch.rand(4, T, generator=draw) < 0.2).cumsum(1)
        doc[1, -5:] = -1
        ids = torch.randint(0, 40, (4, T), generator=draw)
        batches.append((ids, doc, (torch.rand(4, T, generator=draw) < 0.6).float()))
    return (
        {n: p.detach() for n, p in trunk.named_parameters()},
        {n: p.detach() for n, p in layers.named_parameters()},
        batches,
    )


def small(c, stage, trunk, layers, batches):
    """What the small recipe's own loop makes of them."""
    model, heads = Transformer(CONFIG).double(), None
    model.load_state_dict(trunk)
    if stage != "cpt":
        heads = MTP(CONFIG, c.mtp.layers).double()
        heads.load_state_dict(layers)
    own = learner.optimizers
    with mock.patch.object(learner, "optimizers", lambda *args, **how: calls.in_own_dtype(own(*args, **how))):
        rates = (c.sft.muon_lr, c.sft.adamw_lr) if stage == "sft" else (c.training.muon_lr, c.training.adamw_lr)
        state = Learner(c, model, heads, *rates)
    silent = Silent()
    learner.train(
        silent,
        c,
        state,
        batches.__getitem__,
        STEPS,
        lambda step: RATES[stage](step, STEPS),
        stage,
        trunk=stage != "mtp",
    )
    return (
        silent.lines,
        dict(state.trunk.masters.named_parameters()),
        dict(state.mtp.masters.named_parameters()) if state.mtp else {},
    )


@pytest.mark.parametrize(
    "stage, detach", STAGES, ids=lambda value: value if isinstance(value, str) else "detached" if value else "joint"
)
def test_three_steps_are_the_small_recipe_s(start, stage, detach, tmp_path):
    """Weights and metrics of every stage, in float64, on 1, 2 and 4 ranks; the trunk of `mtp` does not move."""
    trunk, layers, batches = start
    batches = [(ids, doc, weight if stage == "sft" else None) for ids, doc, weight in batches]
    c = settings_of(detach)
    lines, wanted, heads = small(c, stage, trunk, layers, batches)
    moved = {name for name, x in wanted.items() if not torch.equal(x, trunk[name])}
    assert moved == (set() if stage == "mtp" else set(wanted)) and all(
        not torch.equal(x, layers[name]) for name, x in heads.items()
    )
    for number, layout in enumerate(LAYOUTS):
        first, *_ = ranks(layout["dp"] * layout["cp"]).run(
            layout,
            calls.phase,
            c,
            CONFIG,
            stage,
            trunk,
            None if stage == "cpt" else layers,
            batches,
            tmp_path / str(number),
        )
        seen = 0.0
        for found, line in zip(first[0], lines, strict=True):
            seen += found["tokens"]
            assert seen == line["tokens"]
            for name in ("loss", "mtp_loss", *(f"{kind}_{k}" for kind in ("kl", "agree") for k in (1, 2))):
                assert (name in found) == (name in line), name
                if name in line:
                    close(found[name], line[name])
        for found, those in ((first[1], wanted), (first[2], heads)):
            assert found.keys() == those.keys()
            for name, x in those.items():
                close(found[name], x)


def test_micro_batches_of_a_dense_network_change_nothing(start, tmp_path):
    """The balance loss alone is a micro-batch's own."""
    _, _, batches = start
    config = replace(CONFIG, num_experts=0, intermediate_size=24)
    torch.manual_seed(2)
    trunk = {name: p.detach() for name, p in Transformer(config).double().named_parameters()}
    layers = {
        name: p.detach()
        for name, p in MTP(config, MTPConfig(depth=2, intermediate_size=12)).double().named_parameters()
    }
    found = []
    for rows in (4, 1):
        c, folder = settings_of(detach=False, micro_rows=rows), tmp_path / str(rows)
        found.append(
            ranks(2).run(dict(dp=2, cp=1, ep=1), calls.phase, c, config, "sft", trunk, layers, batches, folder)[0]
        )
    (lines, weights, heads), (others, *rest) = found
    for a, b in zip(lines, others, strict=True):
        close(a["loss"], b["loss"]), close(a["mtp_loss"], b["mtp_loss"])
    for here, there in zip((weights, heads), rest, strict=True):
        for name, x in here.items():
            close(x, there[name])


@settings(max_examples=30)
@given(st.integers(0, 2**31 - 1), st.booleans(), st.integers(1, 3))
def test_denominators_are_those_of_the_losses(seed, weighted, depth):
    """Counted before the forward pass, in the complete batch."""
    draw = torch.Generator().manual_seed(seed)
    doc = (torch.rand(3, 7, generator=draw) < 0.3).cumsum(1)
    doc[:, 6 - seed % 4 :] = -1
    weight = torch.rand(3, 7, generator=draw) * (torch.rand(3, 7, generator=draw) < 0.7) if weighted else None
    torch.manual_seed(0)
    model, layers = Transformer(CONFIG), MTP(CONFIG, MTPConfig(depth=depth, intermediate_size=4))
    ids = torch.randint(0, 40, doc.shape, generator=draw)
    out = model(ids, doc=doc, logits=False)
    tokens, drafted = counts(doc, weight, depth)
    assert tokens == pytest.approx(next_token_loss(model, out.hidden, ids, doc, weight)[1] or 1e-9)
    assert drafted == pytest.approx(mtp_loss(layers, model, out, ids, doc, weight)[1] or 1e-9)
