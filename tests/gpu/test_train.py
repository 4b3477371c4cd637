"""What only a GPU can show of training: how often attention is compiled, what a save costs, chunks, and whether a run
repeats its bits."""

import hashlib
import warnings

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from ref.network import Config
from ref.network.documents import attend_blocks, make_block_mask
from scaled import cpt, muon
from scaled.network.model import Transformer, load_balancing_loss
from scaled.runtime.checkpoint import Checkpoints
from scaled.runtime.mesh import computing

pytestmark = pytest.mark.gpu


@pytest.fixture
def as_a_run():
    """Deterministic mode off, as in a run."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def network(**changes) -> Transformer:
    shape = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": 256,
        **changes,
    }
    torch.manual_seed(0)
    return Transformer(Config.tiny(4096, max_position_embeddings=8192, **shape)).to("cuda")


def rows_of(number: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(number)
    ids = torch.randint(4096, (2, length), generator=generator, device="cuda")
    ends = torch.rand(2, length, generator=generator, device="cuda") < 0.01
    return ids, ends.long().cumsum(1)


def backward(model: Transformer, ids: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    out = model(ids, doc=documents, logits=False)
    loss, count = cpt.next_token_loss(model, out.hidden, ids, documents)
    loss = loss / count + model.config.router_aux_loss_coef * load_balancing_loss(out.router_logits, out.experts)
    loss.backward()
    return loss


def test_twelve_lengths_compile_attention_three_times_at_most(as_a_run):
    model = network(num_hidden_layers=1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for number, length in enumerate(range(1024, 1024 + 12 * 256, 256)):
        backward(model, *rows_of(number, length))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= compiled <= 3, compiled


@pytest.mark.parametrize("length", [128, 129, 1024, 1500])
def test_compiled_attention_sees_what_the_mask_shows(as_a_run, length):
    """Values and gradients of `attend_blocks` beside a product with the mask in memory. Shorter rows do not come here
    (`fast.make_document_mask`)."""
    documents = rows_of(length, length)[1]
    documents[:, length - length // 8 :] = -1
    q, k, v = (torch.randn(2, heads, length, 64, device="cuda", requires_grad=True) for heads in (8, 2, 2))
    weight = torch.randn(2, 8, length, 64, device="cuda")
    place = torch.arange(length, device="cuda")
    seen = (place[:, None] >= place) & (documents[:, :, None] == documents[:, None])
    wanted = F.scaled_dot_product_attention(q, k, v, seen[:, None], scale=1.0, enable_gqa=True)
    found = attend_blocks(q, k, v, make_block_mask(documents))
    exact = torch.autograd.grad((wanted * weight).sum(), (q, k, v))
    for one, other in zip(
        (found, *torch.autograd.grad((found * weight).sum(), (q, k, v))), (wanted, *exact), strict=True
    ):
        assert (one - other).norm() <= 3e-3 * other.norm(), ((one - other).norm() / other.norm()).item()


def test_a_save_takes_two_hundredths_of_the_state(as_a_run, tmp_path):
    state = {f"weight {n}": torch.randn(2**24, device="cuda") for n in range(16)}
    size = sum(x.numel() * x.element_size() for x in state.values())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    shelf = Checkpoints(tmp_path)
    shelf.save(1, state)
    saved = {name: x.clone() for name, x in state.items() if name == "weight 3"}
    state["weight 3"].zero_()  # the next step changes weights while the thread writes
    shelf.finish()
    assert torch.cuda.max_memory_allocated() - before <= 0.02 * size + saved["weight 3"].nbytes
    loaded = {"weight 3": torch.zeros(2**24, device="cuda")}
    shelf.load(loaded)
    assert torch.equal(loaded["weight 3"], saved["weight 3"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_chunks_of_a_row_are_causal_attention(ranks):
    """What `scaled.network.model.Attention.product` computes for each rank's two chunks, against the complete row on
    one rank."""
    length, size = 4096, 4096 // (2 * ranks)
    q, k, v = (
        torch.randn(1, heads, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    weight = torch.randn(1, 8, length, 64, device="cuda", dtype=torch.bfloat16)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad((whole * weight).sum(), (q, k, v))
    outs = []
    for chunk in range(2 * ranks):
        end = (chunk + 1) * size
        part = q[:, :, chunk * size : end]
        outs.append(
            F.scaled_dot_product_attention(
                part, k[:, :, :end], v[:, :, :end], causal_lower_right(size, end), enable_gqa=True
            )
        )
    chunks = torch.cat(outs, 2)
    torch.testing.assert_close(chunks, whole, rtol=0.02, atol=0.02)
    for found, expected in zip(torch.autograd.grad((chunks * weight).sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * expected.float().abs().max().item())


@pytest.mark.parametrize(
    "formats", [{}, {"rematerialise": True}, {"experts": "mxfp8"}], ids=["plain", "recomputed", "mxfp8"]
)
@pytest.mark.parametrize("use_muon", [False, True], ids=["adamw", "muon"])
def test_ten_steps_twice_give_the_same_bits(as_a_run, formats, use_muon):
    def train() -> tuple[str, float]:
        model = network(num_hidden_layers=2)
        optimizers = muon.optimizers(model, use_muon=use_muon)
        loss = torch.zeros(())
        for step in range(10):
            loss = backward(model, *rows_of(step, 1024))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
        return digest.hexdigest(), loss.item()

    with computing(**formats):
        first, second = train(), train()
        if first != second:
            torch.use_deterministic_algorithms(True, warn_only=True)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                train()
            named = sorted(
                {str(one.message).split(" does not have")[0] for one in seen if "deterministic" in str(one.message)}
            )
            raise AssertionError(
                f"two trainings differ ({first[1]} and {second[1]}); operations without a deterministic form: {named}"
            )
