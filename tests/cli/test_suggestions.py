"""A name at the wrong door: one line that names the command that was meant, and nothing on disk."""

from pathlib import Path

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude import catalog
from etude.cli import suggestions
from kit.settings import RunError

PLAYS = "etude play takes the folder of a run of the recipe, such as runs/small"
WRONG = [
    (
        ["run", "fugure"],
        "unknown technique 'fugure'; did you mean the command etude figure? etude list shows the techniques",
    ),
    (["run", "kl-varience"], "did you mean the figure kl-variance, etude figure kl-variance?"),
    (["run", "plya"], "did you mean the command etude play?"),
    (["run", "play"], "play is a command, etude play, and not a technique"),
    (
        ["run", "runs/small"],
        "runs/small is a run of recipe; to resume it: etude run recipe --out runs/small --resume; to "
        "watch its agent: etude play",
    ),
    (
        ["run", "runs/figure/mtp"],
        "runs/figure/mtp is a run of figure mtp; to resume it: etude figure mtp --out runs/figure/mtp --resume",
    ),
    (["run", "runs/large"], "to resume it: etude run recipe --scale full --out runs/large --resume"),
    (["run", "runs/large"], "--resume, with its --backend and --nproc"),
    (["run", "runs/text"], "runs/text is a run of etude data"),
    (["run", "runs/base"], "runs/base is a run of etude eval base"),
    (["figure", "runs/small"], "runs/small is a run of recipe"),
    (
        ["figure", "dr-grpo"],
        "dr-grpo is a technique: etude run dr-grpo; to reproduce its figure: etude figure grpo-bias",
    ),
    (["figure", "dr-grp"], "unknown experiment 'dr-grp'; did you mean the technique dr-grpo, etude run dr-grpo?"),
    (["figure", "kl-varience"], "unknown experiment 'kl-varience'; did you mean kl-variance? Choose from: kl-variance"),
    (["play", "kl-variance"], f"kl-variance is a figure: etude figure kl-variance; {PLAYS}"),
    (["play", "dr_grpo"], f"dr_grpo is a technique: etude run dr-grpo; {PLAYS}"),
    (["play", "mtp"], f"mtp is a technique and a figure: etude run mtp, etude figure mtp; {PLAYS}"),
    (["play", "small"], "small does not exist; did you mean runs/small?"),
    (["play", "runs/kl"], f"runs/kl is a run of kl, and contains no agent; {PLAYS}"),
    (["eval", "quant"], "quant is a technique: etude run quant; etude eval agent takes the folder of a run"),
    (["results", "recipe"], "recipe is a technique: etude run recipe; etude results takes the folder of a run"),
    (["results", "runs/small", "--control", "small"], "small does not exist; did you mean runs/small?"),
    (["export-sft", "sft", "--out", "x.jsonl"], "sft is not a small run of the recipe"),
    (["examples", "--run", "kl"], "etude examples takes the folder of a run of the recipe"),
    (["bench", "engine", "muon"], "muon is a technique: etude run muon; etude bench engine takes"),
    (
        ["claims", "kl-variance"],
        "etude claims takes the folder of a finished experiment, such as runs/figure/kl-variance",
    ),
    (["kl"], "kl is a technique: etude run kl"),
    (["best-of-k"], "best-of-k is a figure: etude figure best-of-k"),
    (["fugure"], "No such command 'fugure'. Did you mean 'figure'?"),
    (["lesson", "best-of-k"], "got 'best-of-k'; best-of-k is a figure: etude figure best-of-k"),
    (["lesson", "99"], "there is no lesson 99"),
]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a run of the recipe, small and full, one of a technique, and one of a figure."""
    for name, technique in (
        ("small", "recipe"),
        ("large", "recipe full"),
        ("kl", "kl"),
        ("figure/mtp", "figure mtp"),
        ("text", "data"),
        ("base", "eval base"),
    ):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text(f'{{"technique": "{technique}", "config": {{}}}}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "says"), WRONG, ids=[" ".join(words) + f" {n}" for n, (words, _) in enumerate(WRONG)]
)
def test_a_name_at_the_wrong_door_is_told_the_right_one(words, says, home, ask):
    before = sorted(home.rglob("*"))
    code, out, error = ask(*words)
    assert code == 2 and out == "" and error.count("\n") == 1 and error.startswith("error: ") and says in error
    assert sorted(home.rglob("*")) == before


def test_a_folder_that_has_the_name_of_a_technique_is_a_folder(home):
    (home / "muon").mkdir()
    assert suggestions.a_run(click.Context(click.Command("play")), Path("muon")) == Path("muon")


@pytest.mark.parametrize("entry", [entry for entry in catalog.TECHNIQUES if entry.lesson], ids=lambda entry: entry.name)
def test_a_lesson_has_the_number_and_the_name_of_its_technique(entry):
    number = suggestions.lesson_number(entry.name)
    assert suggestions.lesson_number(str(number)) == number and entry.lesson.startswith(f"lessons/{number:02d}_")


@settings(max_examples=25)
@given(st.text(max_size=20))
def test_any_word_is_refused_in_a_line_or_known(word):
    """Whatever was typed, both doors say something of it in one line, and only what the catalogue has is called a
    technique or figure."""
    for refuse, find in (
        (suggestions.no_technique, catalog.find),
        (suggestions.no_experiment, catalog.find_experiment),
    ):
        if not find(word):
            with pytest.raises(RunError) as said:
                refuse(word, ("run", "figure", "play"))
            assert "\n" not in str(said.value)
    known = catalog.find(word) or catalog.find_experiment(word)
    assert bool(suggestions.what_is(word)) == bool(known)


@settings(max_examples=25)
@given(st.sampled_from([entry.name for entry in (*catalog.TECHNIQUES, *catalog.EXPERIMENTS)]), st.data())
def test_a_slip_of_one_letter_still_finds_its_door(name, data):
    """A letter too few in a long name: the name itself is in the answer."""
    if len(name) < 6:
        return
    at = data.draw(st.integers(1, len(name) - 1))
    slip = name[:at] + name[at + 1 :]
    if catalog.find(slip) or catalog.find_experiment(slip):
        return
    with pytest.raises(RunError, match=f"did you mean .*{name}"):
        suggestions.no_technique(slip, ("run", "figure", "play"))
