"""Hugging Face folders: what is written, what survives, and one clear line for everything that can be wrong
with one."""

import dataclasses
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ref.network import CheckpointError, Config, Transformer, checkpoint, load_extra, load_hf, save_hf
from ref.network.model import config_of, rope_table

C = Config.tiny(vocab_size=20, hidden_size=8, num_hidden_layers=2, head_dim=4, num_experts=3, moe_intermediate_size=6)


@pytest.fixture
def model():
    return Transformer(C)


def edit(path, **changes):
    """config.json with some values changed; None removes a key."""
    record = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in record.items() if v is not None}))


def equal(a: Transformer, b: Transformer) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# ------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("max_shard_bytes", [1, 1500, 2**30])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, {"num_experts": 0}], ids=["moe", "untied", "dense"]
)
def test_what_is_saved_is_loaded(tmp_path, dtype, max_shard_bytes, changes):
    model = Transformer(Config.tiny(**{**{f: getattr(C, f) for f in C.__dataclass_fields__}, **changes})).to(dtype)
    save_hf(model, tmp_path / "m", max_shard_bytes=max_shard_bytes)
    assert equal(load_hf(tmp_path / "m", dtype), model)
    assert all(p.requires_grad for p in load_hf(tmp_path / "m").parameters())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", experts_implementation="eager")
    assert theirs.dtype == dtype
    torch.testing.assert_close(theirs.model.embed_tokens.weight, model.embed_tokens.weight, rtol=0, atol=0)


def test_shards_and_index(tmp_path, model):
    save_hf(model, tmp_path / "m", max_shard_bytes=1500)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    shards = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == shards
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "m" / shard).values()) for shard in shards]
    assert max(sizes) <= 1500 and sum(sizes) == index["metadata"]["total_size"] == C.parameters() * 4


def test_experts_lie_one_by_one_on_disk(tmp_path, model):
    save_hf(model, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    mlp = model.layers[1].mlp
    assert torch.equal(tensors["model.layers.1.mlp.experts.2.gate_proj.weight"], mlp.gate_up_proj[2, :6])
    assert torch.equal(tensors["model.layers.1.mlp.experts.2.up_proj.weight"], mlp.gate_up_proj[2, 6:])
    assert torch.equal(tensors["model.layers.1.mlp.experts.2.down_proj.weight"], mlp.down_proj[2])
    assert "lm_head.weight" not in tensors


def test_config_is_what_both_generations_of_transformers_read(tmp_path, model):
    save_hf(model.bfloat16(), tmp_path / "m")
    record = json.loads((tmp_path / "m" / "config.json").read_text())
    assert record["architectures"] == ["Qwen3MoeForCausalLM"] and record["model_type"] == "qwen3_moe"
    assert record["rope_theta"] == record["rope_parameters"]["rope_theta"] == C.rope_theta
    assert record["dtype"] == record["torch_dtype"] == "bfloat16"
    assert record["num_experts"] == 3 and record["tie_word_embeddings"] is True


def test_old_configs_are_read(tmp_path, model):
    """transformers 4 wrote rope_theta beside the rest; transformers 5 writes num_local_experts."""
    save_hf(model, tmp_path / "m")
    edit(
        tmp_path / "m",
        rope_parameters=None,
        rope_theta=1234.5,
        num_experts=None,
        num_local_experts=3,
        rope_scaling=None,
    )
    assert load_hf(tmp_path / "m").config.rope_theta == 1234.5


def test_a_stored_head_that_is_tied_may_be_there(tmp_path, model):
    save_hf(model, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert equal(load_hf(tmp_path / "m"), model)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match="lm_head.weight differs"):
        load_hf(tmp_path / "m")


def test_extra_tensors(tmp_path, model):
    save_hf(model, tmp_path / "m", extra={"mtp.weight": torch.arange(6.0).view(2, 3).t()})
    assert torch.equal(load_extra(tmp_path / "m")["mtp.weight"], torch.arange(6.0).view(2, 3).t())
    assert equal(load_hf(tmp_path / "m"), model)
    AutoModelForCausalLM.from_pretrained(tmp_path / "m", experts_implementation="eager")
    # vLLM takes every *.safetensors of the folder, but of no subfolder, for a part of the network.
    assert [path.name for path in (tmp_path / "m").glob("*.safetensors")] == ["model.safetensors"]
    save_hf(model, tmp_path / "m")
    assert load_extra(tmp_path / "m") == {}, "they belonged to the checkpoint that was replaced"
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["extra.safetensors", "mtp.safetensors"])
def test_extra_tensors_are_read_where_they_lay_before(tmp_path, model, name):
    save_hf(model, tmp_path / "m")
    save_file({"mtp.weight": torch.ones(2)}, tmp_path / "m" / name)
    assert torch.equal(load_extra(tmp_path / "m")["mtp.weight"], torch.ones(2))
    save_hf(model, tmp_path / "m", extra={"mtp.weight": torch.zeros(2)})
    assert torch.equal(load_extra(tmp_path / "m")["mtp.weight"], torch.zeros(2))
    assert not (tmp_path / "m" / name).exists()


# ------------------------------------------------------------------------------ replacing


def test_other_files_stay_and_old_shards_go(tmp_path, model):
    path = tmp_path / "m"
    save_hf(model, path, max_shard_bytes=1000)
    (path / "tokenizer.json").write_text("{}")
    (path / "notes").mkdir()
    (path / "notes" / "a.txt").write_text("a")
    other = Transformer(C)
    save_hf(other, path)
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors", "notes", "tokenizer.json"]
    assert (path / "notes" / "a.txt").read_text() == "a"
    assert equal(load_hf(path), other)
    assert [p.name for p in tmp_path.iterdir()] == ["m"], "nothing is left beside it"


THEIRS = [
    "model.safetensors.bak",
    "model.safetensors.d/a",
    "model-00001-of-00002.safetensors.old",
    "mymodel.safetensors",
    "model-1-of-2.safetensors",
    "config.json~",
    "extra.safetensors.txt",
    "mtp/notes.txt",
    "mtp/a.safetensors",
]


def test_no_file_of_someone_else_goes(tmp_path, model):
    path = tmp_path / "m"
    for round_, extra in enumerate([None, {"mtp.weight": torch.ones(1)}, None]):
        save_hf(model, path, extra=extra)
        for name in THEIRS:
            (path / name).parent.mkdir(exist_ok=True)
            assert round_ == 0 or (path / name).read_text() == name
            (path / name).write_text(name)
    assert equal(load_hf(path), model) and load_extra(path) == {}


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "mtp/model.safetensors", "README.md"],
)
def test_a_folder_in_a_file_s_place_is_not_touched(tmp_path, model, name):
    path = tmp_path / "m"
    save_hf(model, path)
    (path / name).unlink(missing_ok=True)
    (path / name).mkdir(parents=True)
    (path / name / "mine").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="is a folder.*move it away"):
        save_hf(model, path, sidecar_files={"README.md": b"card"})
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["m/mtp", ".m.saving"])
@pytest.mark.parametrize("link", [False, True])
def test_a_file_or_link_in_a_folder_s_place_is_not_touched(tmp_path, model, name, link):
    save_hf(model, tmp_path / "m")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").touch()
    if link:
        (tmp_path / name).symlink_to(tmp_path / "mine")
    else:
        (tmp_path / name).touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="is a file or a link.*move it away"):
        save_hf(model, tmp_path / "m", extra={"mtp.weight": torch.ones(1)})
    assert sorted(tmp_path.rglob("*")) == before


def test_files_beside_the_weights_come_and_stay_with_them(tmp_path, model, monkeypatch):
    path = tmp_path / "m"
    save_hf(model, path, sidecar_files={"README.md": b"one", "tokenizer.json": b"{}"})
    with monkeypatch.context() as patch:  # the files come along by hard links: the old ones must not be written into
        patch.setattr(checkpoint, "replace", lambda *_: None)
        save_hf(model, path, sidecar_files={"README.md": b"two"})
    assert (path / "README.md").read_bytes() == b"one"
    save_hf(model, path, sidecar_files={"README.md": b"two"})
    assert (path / "README.md").read_bytes() == b"two" and (path / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize("where", ["", "notes"])
def test_a_process_may_work_in_the_folder(tmp_path, model, monkeypatch, where):
    """It stays in the folder of that name, which is not deleted under its feet."""
    path = tmp_path / "m"
    save_hf(model, path)
    (path / "notes").mkdir()
    monkeypatch.chdir(path / where)
    other = Transformer(C)
    save_hf(other, "." if not where else "..")
    assert Path.cwd() == path / where and equal(load_hf("." if not where else ".."), other)
    Path("new").touch()
    assert (path / where / "new").exists() and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("dies_in", ["save_file", "flush", "change_places"])
def test_death_while_writing_leaves_the_old_one(tmp_path, model, monkeypatch, dies_in):
    path = tmp_path / "m"
    save_hf(model, path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, dies_in, lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save_hf(Transformer(C), path)
    assert equal(load_hf(path), model)
    other = Transformer(C)
    save_hf(other, path)
    assert equal(load_hf(path), other) and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "three renames"])
def test_folders_change_places(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(checkpoint.sys, "platform", "somewhere else")
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    checkpoint.change_places(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_linked_folder_is_written_where_it_lies(tmp_path, model):
    save_hf(model, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    other = Transformer(C)
    save_hf(other, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and equal(load_hf(tmp_path / "real"), other)


def test_a_file_in_the_way_is_not_touched(tmp_path, model):
    (tmp_path / "m").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        save_hf(model, tmp_path / "m")
    assert (tmp_path / "m").read_text() == "mine"


# ------------------------------------------------------------------------------ faults

UNSUPPORTED = {
    "other model": ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    "yarn without a factor": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "factor missing from the rope scaling of type 'yarn'",
    ),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_parameters": None},
        "rope scaling of type 'dynamic'",
    ),
    "part rotation": ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "window": ({"use_sliding_window": True, "sliding_window": 128}, "sliding-window attention"),
    "window layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    "some dense layers": ({"mlp_only_layers": [1]}, "mlp_only_layers"),
    "sparse step": ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
    "no width": ({"hidden_size": None}, "hidden_size missing"),
    "no expert width": ({"moe_intermediate_size": None, "num_key_value_heads": None}, "num_key_value_heads, moe_"),
    "words for numbers": ({"hidden_size": "eight"}, "hidden_size must be a positive whole number; got 'eight'"),
    "zero heads": ({"num_attention_heads": 0}, "num_attention_heads must be a positive whole number; got 0"),
    "zero keys": ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive whole number; got 0"),
    "true heads": ({"num_key_value_heads": True}, "num_key_value_heads must be a positive whole number; got True"),
    "a word of yarn": ({"rope_scaling": "yarn"}, "rope_scaling must be an object; got 'yarn'"),
    "false in quotes": ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false; got 'false'"),
    "gates in quotes": ({"norm_topk_prob": "false"}, "norm_topk_prob must be true or false; got 'false'"),
    "theta in quotes": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": "1e6"}},
        r"rope_parameters.rope_theta must be a number; got '1e6'",
    ),
    "no number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number; got nan"),
    "uneven groups": ({"num_attention_heads": 3}, "multiple of num_key_value_heads"),
    "more than there are": ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
}


@pytest.mark.parametrize("changes, message", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_config_that_would_be_misread_is_refused(tmp_path, model, changes, message):
    save_hf(model, tmp_path / "m")
    edit(tmp_path / "m", **changes)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_hf(tmp_path / "m")
    assert str(tmp_path / "m" / "config.json") in str(raised.value) and "\n" not in str(raised.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text(max_size=6),
    lambda one: st.lists(one, max_size=2) | st.dictionaries(st.sampled_from(["rope_type", "type", "rope_theta"]), one),
    max_leaves=3,
)
ROPES = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn"]), "factor": st.integers(1, 8)},
    optional={
        name: JSON
        for name in (*checkpoint.ROPE_NUMBERS[1:], "original_max_position_embeddings", "truncate", "rope_theta")
    },
)
FIELDS = sorted(json.loads(checkpoint.write_config(dataclasses.asdict(C), torch.float32)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.sampled_from([*FIELDS, "rope_scaling", "layer_types", "sliding_window"]), JSON, max_size=3),
    st.none() | ROPES,
    st.sampled_from(sorted(checkpoint.FAMILIES)),
)
def test_whatever_a_config_holds_it_is_read_or_refused_in_one_line(changes, rope, family):
    with tempfile.TemporaryDirectory() as folder:
        changes = changes if rope is None else {"rope_scaling": rope} | changes
        record = (
            json.loads(checkpoint.write_config(dataclasses.asdict(C), torch.float32)) | {"model_type": family} | changes
        )
        (Path(folder) / "config.json").write_text(json.dumps(record))
        try:
            config = config_of(folder)
        except CheckpointError as error:
            assert "\n" not in str(error) and str(error).startswith(folder)
        else:
            assert type(config.tie_word_embeddings) is type(config.norm_topk_prob) is bool
            assert config.num_key_value_heads > 0 and type(config.hidden_size) is int
            rope_table(config, torch.arange(3), torch.float32)  # nothing is left for it to stumble over


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 4096},
        {"use_sliding_window": True, "sliding_window": None},
        {"layer_types": ["full_attention", "full_attention"]},
        {"rope_scaling": {"rope_type": "default"}},
        {"mlp_only_layers": [], "decoder_sparse_step": 1},
    ],
    ids=str,
)
def test_config_that_asks_for_nothing_special_is_read(tmp_path, model, changes):
    save_hf(model, tmp_path / "m")
    edit(tmp_path / "m", **changes)
    assert equal(load_hf(tmp_path / "m"), model)


def remove(name):
    return lambda path: (path / name).unlink()


def cut(name, keep):
    def fault(path):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: int(len(content) * keep) if keep < 1 else keep])

    return fault


def retensor(change, name="model-00002-of-00003.safetensors"):
    def fault(path):
        tensors = load_file(path / name)
        change(tensors)
        save_file(tensors, path / name)

    return fault


def reindex(change):
    def fault(path):
        file = path / "model.safetensors.index.json"
        record = json.loads(file.read_text())
        change(record["weight_map"])
        file.write_text(json.dumps(record))

    return fault


EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"
FAULTS = {
    "no config": (remove("config.json"), "m is not a checkpoint: it has no config.json"),
    "half a config": (cut("config.json", 0.5), "config.json is damaged: not valid JSON"),
    "no index": (remove("model.safetensors.index.json"), "neither model.safetensors nor model.safetensors.index"),
    "half an index": (cut("model.safetensors.index.json", 0.5), "index.json is damaged"),
    "an index of paths": (reindex(lambda m: m.update({EXPERT: "../x"})), "index.json is damaged: weight_map"),
    "no shard": (remove("model-00002-of-00003.safetensors"), "model-00002-of-00003.safetensors is missing"),
    "half a shard": (
        cut("model-00002-of-00003.safetensors", 0.5),
        "model-00002-of-00003.safetensors is damaged or truncated",
    ),
    "last byte": (
        cut("model-00003-of-00003.safetensors", 0.999),
        "model-00003-of-00003.safetensors is damaged or truncated",
    ),
    "empty shard": (
        cut("model-00001-of-00003.safetensors", 0),
        "model-00001-of-00003.safetensors is damaged or truncated",
    ),
    "tensor not where it should be": (
        retensor(lambda t: t.pop(EXPERT)),
        f"has no tensor {EXPERT}, but the index says it does",
    ),
    "tensor nowhere": (reindex(lambda m: m.pop(EXPERT)), f"tensor {EXPERT} missing"),
    "tensor of nobody": (
        reindex(lambda m: m.update(extra="model-00001-of-00003.safetensors")),
        "tensor extra in model-00001-of-00003.safetensors does not belong to this network",
    ),
    "wrong shape": (
        retensor(lambda t: t.update({EXPERT: torch.zeros(6, 9)})),
        rf"tensor {EXPERT} must hold floats of shape \[6, 8\]; got torch.float32 of shape \[6, 9\]",
    ),
    "integers": (
        retensor(lambda t: t.update({EXPERT: torch.zeros(6, 8, dtype=torch.int64)})),
        rf"{EXPERT} must hold floats of shape \[6, 8\]; got torch.int64",
    ),
    "quantised without a scale": (
        retensor(lambda t: t.update({EXPERT: torch.zeros(6, 8).to(torch.float8_e4m3fn)})),
        rf"{EXPERT} must hold floats of shape \[6, 8\]; got torch.float8_e4m3fn",
    ),
    "a weight that is no number": (
        retensor(lambda t: t.update({EXPERT: torch.full((6, 8), torch.nan)})),
        rf"tensor {EXPERT} holds weights that are NaN or infinite",
    ),
    "an infinite weight": (
        retensor(lambda t: t[EXPERT][0, 0].fill_(-torch.inf)),
        rf"tensor {EXPERT} holds weights that are NaN or infinite",
    ),
}


@pytest.mark.parametrize("fault, message", FAULTS.values(), ids=FAULTS)
def test_faults_are_named(tmp_path, model, fault, message):
    save_hf(model, tmp_path / "m", max_shard_bytes=2800)
    assert (tmp_path / "m" / "model-00003-of-00003.safetensors").exists()
    fault(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message) as raised:
        load_hf(tmp_path / "m")
    assert "\n" not in str(raised.value)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is not a checkpoint"):
        load_hf(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is not a checkpoint"):
        load_hf(tmp_path / "file")


def test_unreadable(tmp_path):
    (tmp_path / "m" / "config.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="config.json cannot be read: Is a directory"):
        load_hf(tmp_path / "m")


# ------------------------------------------------------------------------------ silence


def test_where_a_config_is_silent_transformers_defaults_hold(tmp_path, model):
    """Shapes must be given; all else is what transformers takes it for: also that gates are not divided by their
    sum."""
    save_hf(model, tmp_path / "m")
    silent = (
        "rms_norm_eps",
        "max_position_embeddings",
        "initializer_range",
        "norm_topk_prob",
        "router_aux_loss_coef",
        "rope_parameters",
        "rope_theta",
        "tie_word_embeddings",
    )
    edit(tmp_path / "m", **dict.fromkeys(silent))
    found = checkpoint.read_config(tmp_path / "m")
    record = json.loads((tmp_path / "m" / "config.json").read_text())
    theirs = Qwen3MoeConfig(
        **{name: value for name, value in record.items() if name in checkpoint.SHAPE_FIELDS + checkpoint.MOE_FIELDS}
    )
    assert {name: found[name] for name in silent[:5]} == {name: getattr(theirs, name) for name in silent[:5]}
    assert found["rope_theta"] == theirs.rope_parameters["rope_theta"] == 10_000
    assert found["tie_word_embeddings"] is False and not theirs.tie_word_embeddings
    assert (found["norm_topk_prob"], found["router_aux_loss_coef"]) == (False, 0.001)


def test_what_a_config_says_is_taken(tmp_path):
    """Values that are nobody's default, there and back."""
    c = replace(
        C,
        rope_theta=2e5,
        norm_topk_prob=False,
        router_aux_loss_coef=0.25,
        rms_norm_eps=1e-3,
        initializer_range=0.125,
        max_position_embeddings=77,
        num_experts_per_tok=3,
        tie_word_embeddings=False,
        intermediate_size=11,
    )
    save_hf(Transformer(c), tmp_path / "m")
    assert load_hf(tmp_path / "m").config == c
