"""State tracking: the distance is a metric, the diffs of a chain lead to its last version, and exact match is
brittle."""

import ast
import os
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.settings import RunError
from sims.base_evaluations import tracking
from sims.base_evaluations.distance import levenshtein, similarity
from sims.base_evaluations.history import from_history

SHORT = st.text(alphabet="abc \nä𝄞", max_size=12)


def plain(a: str, b: str) -> int:
    """The definition, cell by cell."""
    table = [[i + j if i * j == 0 else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            table[i][j] = min(table[i - 1][j] + 1, table[i][j - 1] + 1, table[i - 1][j - 1] + (a[i - 1] != b[j - 1]))
    return table[-1][-1]


@given(SHORT, SHORT, SHORT)
def test_the_distance_is_a_metric_and_equals_the_definition(a, b, c):
    assert levenshtein(a, b) == plain(a, b) == levenshtein(b, a)
    assert (levenshtein(a, b) == 0) == (a == b)
    assert levenshtein(a, c) <= levenshtein(a, b) + levenshtein(b, c)
    assert 0 <= similarity(a, b) <= 100 and (similarity(a, b) == 100) == (a == b)


def test_distances_counted_by_hand():
    assert levenshtein("kitten", "sitting") == 3 and levenshtein("", "abc") == 3
    assert similarity("abcd", "abce") == 75 and similarity("", "abc") == 0 and similarity("", "") == 100


def applied(text: str, diff: str) -> str:
    """Another reader of unified diffs: hunks by their line numbers; every line that is kept or removed has to be
    there."""
    old, new, at, left = text.split("\n"), [], 0, []
    for line in diff.split("\n")[:-1]:
        if head := re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            count = 1 if head[2] is None else int(head[2])
            begin = int(head[1]) - (1 if count else 0)  # a hunk without old lines names the line before it
            new += old[at:begin]
            at = begin
            left.append(head)
        elif line[0] == "+":
            new.append(line[1:])
        else:
            assert old[at] == line[1:]
            new += [line[1:]] if line[0] == " " else []
            at += 1
    assert left
    return "\n".join(new + old[at:])


VERSION = st.lists(
    st.sampled_from(["a = 1", "b = 2", "", "    return a", "@@ -1 +1 @@", "+x", "-y", "c\x0cd", "z"]),
    min_size=1,
    max_size=8,
).map(lambda lines: "\n".join(lines) + "\n")


@given(st.lists(VERSION, min_size=2, max_size=5))
def test_the_diffs_of_a_chain_lead_from_the_first_version_to_the_last(versions):
    if any(a == b for a, b in zip(versions, versions[1:])):
        with pytest.raises(ValueError, match="each another than the one before"):
            tracking.chain_of("x.py", versions)
        return
    chain, text = tracking.chain_of("x.py", versions), versions[0]
    for diff, wanted in zip(chain.diffs, versions[1:], strict=True):
        text = applied(text, diff)
        assert text == wanted
    assert chain.final == text and chain.first == versions[0]


FILES = {
    f"m{n}.py": "".join(
        f"def work_{n}_{k}(items, limit_{k}):\n    total = 0\n    for item in items:\n        total += "
        f"item * {k}\n    print(total)\n"
        f"    return total, limit_{k}\n\n\n"
        for k in range(4)
    )
    for n in range(4)
}


@pytest.mark.parametrize("seed", range(5))
def test_synthetic_chains_hold_valid_python_and_fit(seed):
    chains = tracking.synthetic(FILES, (3, 1), 3, 1000, seed)
    assert [len(chain.diffs) for chain in chains] == [1, 1, 1, 3, 3, 3] and len({chain.first for chain in chains}) == 6
    assert (
        chains
        == tracking.synthetic(FILES, (3, 1), 3, 1000, seed)
        != tracking.synthetic(FILES, (3, 1), 3, 1000, seed + 1)
    )
    for chain in chains:
        text = chain.first
        for diff in chain.diffs:
            text = applied(text, diff)
            assert ast.parse(text).body
        assert text == chain.final != chain.first and chain.size <= 1000
        assert chain.size == len((chain.prompt + chain.answer + "\n```").encode())
    short = tracking.synthetic(FILES, (1,), 3, 1000, seed, lambda chain: chain.size < 600)
    assert all(chain.size < 600 for chain in short)


def test_too_few_pieces_are_named():
    with pytest.raises(
        ValueError, match="chains must be fewer, or longer: the files give [0-9]+ of 40 with 2 diffs in 1000 bytes"
    ):
        tracking.synthetic(FILES, (2,), 40, 1000, 0)


def test_baselines_by_hand():
    chain = tracking.chain_of("x.py", ["a\nb\nc\n", "a\nB\nc\n"])
    (found,) = tracking.baselines([chain])
    assert found == {"first": 80.0, "hunk": 100.0}  # the hunk shows all three lines


def test_exact_match_is_brittle_by_hand():
    wanted = "x" * 200
    pairs = [(wanted, wanted), (wanted[:-1], wanted), ("y" * 20 + wanted[20:], wanted), ("", wanted)]
    found = tracking.brittleness(pairs)
    assert found["rejected"] == [False, True]  # 100 and 99.5; 90 and 0 are not near
    assert found["moved"] == pytest.approx([0.5] * 4)


def commit(folder, name, text):
    (folder / name).write_text(text)
    for words in (("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x")):
        subprocess.run(
            ["git", "-C", str(folder), *words], check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
        )


def test_chains_of_a_repository_follow_its_history_and_run_nothing_of_it(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    versions = ["".join(f"value_{k} = {k * n}\n" for k in range(12)) for n in range(1, 5)]
    for text in versions:
        commit(tmp_path, "a.py", text)
    trap = tmp_path / "ran"
    for key in ("core.fsmonitor", "diff.external", "diff.trap.textconv", "core.pager", "core.sshCommand"):
        subprocess.run(["git", "-C", str(tmp_path), "config", key, f"touch {trap}; false"], check=True)
    (tmp_path / ".gitattributes").write_text("*.py diff=trap filter=trap\n")
    chains = from_history(tmp_path, (1, 2), 5, 3000)
    assert len(chains) == 1 and len(chains[0].diffs) == 2 and chains[0].name == "a.py"
    assert [chains[0].first, chains[0].final] == [versions[1], versions[3]]
    assert applied(applied(chains[0].first, chains[0].diffs[0]), chains[0].diffs[1]) == versions[3]
    assert not trap.exists()


def test_folders_without_a_history_are_one_line(tmp_path):
    with pytest.raises(RunError, match="is not a folder; pass a git repository"):
        from_history(tmp_path / "none", (1,), 1, 1000)
    with pytest.raises(RunError, match="git rev-list failed"):
        from_history(tmp_path, (1,), 1, 1000)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit(tmp_path, "a.py", "a = 1\n")
    with pytest.raises(RunError, match="has no Python file with versions"):
        from_history(tmp_path, (1,), 1, 1000)
