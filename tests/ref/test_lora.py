"""Adapters: a network with them computes what the merged network does, they alone are trained, and their files are
PEFT's."""

import copy
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ref import lora, rl
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.muon import optimizers
from ref.network import CheckpointError, Config, Transformer, save_hf
from ref.network import model as definition
from ref.network.checkpoint import disk_name
from ref.rollout import Rollout
from ref.self_summary import Chain
from tests import contexts
from tests.networks import configs, same, scramble

few = settings(max_examples=8, deadline=None)
ranks = st.sampled_from([1, 2, 5])


def adapted(config: Config, rank: int, kind: type = Transformer) -> tuple[Transformer, Transformer]:
    """A network with adapters that were trained, and the network before it had any; float64."""
    base = scramble(kind(config)).double()
    model = lora.adapt(copy.deepcopy(base), rank, seed=3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.normal_(0.0, 0.3)
    return model, base


@few
@given(configs(), ranks, st.sampled_from([Transformer, definition.Transformer]))
def test_merged_weights_compute_the_same(config, rank, kind):
    """Logits and log-probs, in the network that trains and in the one that defines it, and not those of the base."""
    model, base = adapted(config, rank, kind)
    ids = torch.randint(0, config.vocab_size, (2, 7))
    plain = lora.merged(model)
    with torch.no_grad():
        outputs = [network(ids) for network in (model, plain, base)]
        for a, b in zip((outputs[0].logits, outputs[0].hidden), (outputs[1].logits, outputs[1].hidden)):
            same(a, b)
        logps = [network.logprob(out.hidden[0], ids[0]) for network, out in zip((model, plain), outputs)]
        same(*logps)
    assert not torch.allclose(outputs[0].logits, outputs[2].logits)
    assert lora.rank_of(model) == rank and lora.rank_of(plain) == 0
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in base.named_parameters()]


@few
@given(configs(), ranks)
def test_training_starts_from_the_network_itself(config, rank):
    """B is zero, so nothing has changed, to the last bit; A is not."""
    base = scramble(Transformer(config))
    model = lora.adapt(copy.deepcopy(base), rank)
    for (name, weight), (other, p) in zip(lora.weights(model), base.named_parameters(), strict=True):
        assert name == other and torch.equal(weight, p)
    tensors = lora.adapters(model)
    assert all(bool(x.any()) == name.endswith("lora_A") for name, x in tensors.items())
    dense = 7 if not config.num_experts else 4
    assert len(tensors) == 2 * dense * config.num_hidden_layers
    assert sum(x.numel() for x in tensors.values()) == lora.count_parameters(config, rank)
    assert (
        lora.merged(base) is base and lora.adapt(copy.deepcopy(base), 0).state_dict().keys() == base.state_dict().keys()
    )


@few
@given(st.integers(1, 9), st.integers(1, 9), ranks, st.booleans(), st.integers(0, 99))
def test_gradients_are_those_of_the_formula(m, n, rank, bias, seed):
    """y = W x + b + (α/r) B A x, by autograd of the explicit product, and by the chain rule on paper."""
    torch.manual_seed(seed)
    layer = lora.AdaptedLinear(nn.Linear(n, m, bias=bias, dtype=torch.float64), rank)
    with torch.no_grad():
        layer.lora_A.normal_()
        layer.lora_B.normal_()
    x = torch.randn(6, n, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(6, m, dtype=torch.float64)
    layer(x).backward(dy)
    A, B, y = (p.detach().clone().requires_grad_() for p in (layer.lora_A, layer.lora_B, x))
    F.linear(y, layer.weight + lora.ALPHA / rank * B @ A, layer.bias).backward(dy)
    for a, b in ((layer.lora_A, A), (layer.lora_B, B), (x, y)):
        same(a.grad, b.grad)
    same(layer.lora_B.grad, lora.ALPHA / rank * dy.T @ (x @ layer.lora_A.T))
    same(layer.lora_A.grad, lora.ALPHA / rank * (dy @ layer.lora_B).T @ x)
    assert layer.weight.grad is None and (not bias or layer.bias.grad is None)


@few
@given(configs(), ranks)
def test_gradients_in_the_network(config, rank):
    """Those of A and B follow from the gradients of the merged weights, which a network without adapters has."""
    model, _ = adapted(config, rank)
    plain = lora.merged(model)
    ids = torch.randint(0, config.vocab_size, (2, 7))
    for network in (model, plain.requires_grad_(True)):
        network.logprob(network(ids, logits=False).hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).sum().backward()
    wholes = {name: p.grad for name, p in plain.named_parameters()}
    for name, layer in lora.projections(model):
        dW = wholes[f"{name}.weight"]
        same(layer.lora_A.grad, layer.scale * layer.lora_B.T @ dW)
        same(layer.lora_B.grad, layer.scale * dW @ layer.lora_A.T)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == lora.adapters(model).keys()


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "mixture"])
def test_a_step_of_rl_trains_the_adapters_alone(experts):
    """`ref.rl.improve` and `Plain`: frozen weights have no gradient, no moments and the same bits after two steps; a
    sampler gets what was learned."""
    config = dataclasses.replace(contexts.CONFIG, num_experts=experts, intermediate_size=24)
    model, _ = adapted(config, 2)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not lora.is_adapter(name)}
    begun = {name: p.clone() for name, p in lora.adapters(model).items()}
    g = torch.Generator().manual_seed(0)
    chains = [Chain([without_experts(contexts.segment(g, model), experts)], finished=True) for _ in range(6)]
    rollouts = [Rollout(chain, {"tests": float(number % 3)}) for number, chain in enumerate(chains)]
    trainer, sampler = rl.Plain(model, 1e-2), Sampler(model, torch.float64)
    c = rl.Settings(prompts=2, rollouts=3, max_len=contexts.LENGTH, budget_tokens=5, lora=2)
    for _ in range(2):
        trainer.apply(rl.improve(c, model, None, rollouts), 1.0)
    for name, p in model.named_parameters():
        assert torch.equal(p, frozen[name]) if name in frozen else not torch.equal(p, begun[name]), name
    state = trainer.optimizer.state
    assert {id(p) for p in state} == {id(p) for p in model.parameters() if p.requires_grad}
    ids = torch.randint(0, 30, (2, 9))
    old = sampler.model(ids).logits
    sampler.load(model, version=1)
    same(sampler.model(ids).logits, model(ids).logits.detach())
    assert not torch.allclose(old, sampler.model(ids).logits)


def without_experts(segment, experts):
    return segment if experts else dataclasses.replace(segment, experts=segment.experts[:, :, :0][:, :0])


@pytest.mark.parametrize("kind", [Sampler, ContinuousSampler])
def test_a_sampler_s_log_probs_are_the_trainer_s(kind):
    """Of the tokens that it samples, in float64."""
    config = dataclasses.replace(
        contexts.CONFIG, num_experts=0, qk_norm=False, attention_bias=True, intermediate_size=24
    )
    model, _ = adapted(config, 3)
    engine = kind(model, torch.float64).engine(2, 20)
    slots = [engine.add([1, 2, 3, 4], (), torch.rand(20, generator=torch.Generator().manual_seed(n))) for n in range(2)]
    while not engine.is_idle:
        engine.step()
    for slot in slots:
        segment = engine.remove(slot)
        with torch.no_grad():
            logp = model(segment.tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, segment.tokens[1:, None])[:, 0]
        assert segment.sampled.sum() == 16
        same(logp[segment.sampled[1:]].float(), segment.logp[segment.sampled], atol=1e-6)  # it stores float32


def test_weights_do_not_drift():
    """Merging for a sampler a thousand times leaves the base alone, and what is merged is one rounding away from W +
    (α/r) B A."""
    torch.manual_seed(0)
    layer = lora.AdaptedLinear(nn.Linear(8, 8, dtype=torch.bfloat16), 2)
    before = layer.weight.clone()
    with torch.no_grad():
        for _ in range(1000):
            layer.lora_A.normal_()
            layer.lora_B.normal_()
            part = lora.merge_weight(layer.weight, layer.lora_A, layer.lora_B, layer.scale)
    assert torch.equal(layer.weight, before)
    exact = before.double() + layer.scale * layer.lora_B.double() @ layer.lora_A.double()
    torch.testing.assert_close(part.double(), exact, rtol=2**-8, atol=0)


def test_muon_leaves_adapters_to_adamw():
    """And the optimiser's state is theirs: two float32 moments for each of their parameters, a small share of all."""
    config = Config.tiny(100, num_experts=0, num_hidden_layers=1)
    sizes = {}
    for rank in (0, 8):
        model = lora.adapt(Transformer(config), rank)
        used = optimizers(model, 0.02, 1e-3, use_muon=bool(rank))
        model(torch.arange(9)[None]).logits.square().mean().backward()
        for optimizer in used:
            optimizer.step()
        assert [type(optimizer) for optimizer in used] == [torch.optim.AdamW]
        moments = [x for values in used[0].state.values() for key, x in values.items() if key != "step"]
        sizes[rank] = sum(x.nbytes for x in moments)
    assert sizes == {0: 8 * config.parameters(), 8: 8 * lora.count_parameters(config, 8)} and 7 * sizes[8] < sizes[0]


# ------------------------------------------------------------------------------------------------ PEFT's format


@few
@given(configs(), ranks)
def test_files_are_read_back(tmp_path_factory, config, rank):
    """To the last bit, on top of the base."""
    folder = tmp_path_factory.mktemp("adapter")
    model, base = adapted(config, rank)
    lora.save_adapter(folder, lora.adapters(model), "the/base", not config.num_experts, "what came before")
    again = lora.load_adapter(base, folder)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True))
    assert "`the/base`, which is what came before" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda record: record | {"r": 0}, "r must be a positive whole number and lora_alpha 32; got 0 and 32"),
        (lambda record: record | {"lora_alpha": 8}, "got 2 and 8"),
        (lambda record: record | {"r": 3}, "layers.0.self_attn.q_proj.lora_A must have the shape [3, 16], got [2, 16]"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, says):
    model, base = adapted(contexts.CONFIG, 2)
    lora.save_adapter(tmp_path, lora.adapters(model), "base", dense=False)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError) as error:
        lora.load_adapter(base, tmp_path)
    assert says in str(error.value)


FAMILY = {
    "llama": dict(num_experts=0, qk_norm=False, head_dim=8),
    "qwen2": dict(num_experts=0, qk_norm=False, attention_bias=True),
    "qwen3": dict(num_experts=0),
    "qwen3_moe": dict(num_experts=4, moe_intermediate_size=8),
}


@pytest.mark.parametrize("family", FAMILY)
def test_names_and_shapes_are_peft_s(tmp_path, family):
    """`base_model.model.`, the module's name in transformers, `.lora_A.weight` or `.lora_B.weight`: written down here
    for one projection, and, where PEFT is installed, compared with what it reads and computes."""
    config = Config.tiny(
        40, **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
               "head_dim": 8, "intermediate_size": 24} | FAMILY[family]
    )  # fmt: skip
    model, base = adapted(config, 2)
    save_hf(base.float(), tmp_path / "base")
    lora.save_adapter(
        tmp_path / "adapter", lora.adapters(model.float()), str(tmp_path / "base"), not config.num_experts
    )
    names = {f"base_model.model.{disk_name(name)}.weight" for name in lora.adapters(model)}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter")
    state = peft.get_peft_model_state_dict(theirs)
    assert {name: tuple(x.shape) for name, x in state.items()} == {
        f"base_model.model.{disk_name(name)}.weight": tuple(x.shape) for name, x in lora.adapters(model).items()
    }
    ids = torch.randint(0, 40, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=0, atol=2e-5)
        torch.testing.assert_close(
            theirs.merge_and_unload()(ids).logits, lora.merged(model)(ids).logits, rtol=0, atol=2e-5
        )
