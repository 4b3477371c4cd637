"""Files that a run leaves, damaged at random: whoever reads them ends with what was written, or with one line.
Never with a traceback, never with another value."""

import json
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etude.explorer import provenance
from etude.explorer.runs import files as run_files
from etude.ledger import figures
from kit.disk import (
    MAX_DEPTH,
    DamagedFile,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_lines,
    read_text,
    read_toml,
    seal_record,
)
from kit.runs import Run
from kit.settings import RunError
from ref import checks

VALUES = (
    b"null",
    b"true",
    b'"x"',
    b"[]",
    b"{}",
    b"-1",
    b"1e999",
    b"NaN",
    b"9" * 5000,
    b"1.5",
    b'"\\ud800"',
    b"[" * 5000,
    b'{"a":' * 300,
)


def damage(rng: random.Random, content: bytes) -> bytes:
    """Other bytes than `content`: a flipped bit or digit, a part cut out, doubled or overwritten, a value of
    another type, another file."""
    at, size = rng.randrange(len(content) + 1), rng.choice((1, 2, 8, 64))
    numbers = [match.span() for match in re.finditer(rb'-?\d+(\.\d+)?|"[^"]*"|null|true|false', content)]
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    kind = rng.randrange(9)
    if kind == 0 and content:
        at = min(at, len(content) - 1)
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if kind == 1 and digits:
        at = rng.choice(digits)
        return content[:at] + b"%d" % ((content[at] - 47 + rng.randrange(9)) % 10) + content[at + 1 :]
    if kind == 2:
        return content[:at]
    if kind == 3:
        return content[:at] + content[at + size :]
    if kind == 4:
        return content[:at] + content[max(0, at - size) :]
    if kind == 5:
        return content[:at] + rng.randbytes(size) + content[at + size :]
    if kind == 6 and numbers:
        first, last = rng.choice(numbers)
        return content[:first] + rng.choice(VALUES) + content[last:]
    if kind == 7:
        return rng.choice(
            (b"", b"[" * 100_000, b"{}", b"[]", b"3", b"null", b"\xff\xfe", b'{"technique": 1}', b"\n" * 99, bytes(999))
        )
    return content + rng.choice(VALUES)


@dataclass(frozen=True)
class Config:
    seed: int = 0
    name: str = "x"


RESULT = {"loss": 0.123456789, "steps": 17, "by": [{"a": None}, {"a": -1e-300}]}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with a finished stage that left a file, and a stage with two checkpoints."""
    root = tmp_path_factory.mktemp("damaged") / "run"
    with Run.open(root, "toy", Config()) as run:
        first, second = run.stage("a", 3), run.stage("b", 30)
        first.log(1, loss=0.5)
        run.path("data", "rows.bin").write_bytes(b"rows")
        first.finish(RESULT, [root / "data"])
        for step in (10, 20):
            second.log(step, loss=1 / step)
            second.save({"step": step, "x": torch.full((3,), float(step))}, step)
    return root


def resume(root) -> tuple:
    """What a resumed run relies on: the result of its finished stage and the newest state of the other."""
    with Run.open(root, "toy", Config(), resume=True) as run:
        state = run.stage("b", 30).restore()
        stage = run.stage("a", 3)
        return stage.result() if stage.finished else None, state and (state["step"], state["x"].tolist())


STATES = [(step, [float(step)] * 3) for step in (20, 10)]


@settings(max_examples=120)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_run_is_the_same_run_or_is_refused_in_one_line(run_folder, tmp_path_factory, seed):
    rng, root = random.Random(seed), tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(run_folder, root)
    path = rng.choice(
        sorted(path for path in root.rglob("*") if path.is_file() and path.suffix in (".json", ".pt", ".jsonl", ".bin"))
    )
    content = path.read_bytes()
    path.write_bytes(damage(rng, content))
    try:
        result, state = resume(root)
    except RunError as error:
        assert "\n" not in str(error) and str(path.name.split(".")[0]) in str(error) and len(str(error)) < 1000
    else:
        assert result == RESULT and state in STATES
        assert state == STATES[0] or path.name.startswith(("b", "b-000020"))
    finally:
        shutil.rmtree(root.parent)


@pytest.mark.parametrize("name", ["config.json", "stages/a.json", "state/b-000020.json"])
def test_every_flipped_digit_of_a_record_is_seen(run_folder, tmp_path, name, capsys):
    root = tmp_path / "run"
    shutil.copytree(run_folder, root)
    path = root / name
    content = path.read_text()
    for match in re.finditer(r"\d", content):
        path.write_text(content[: match.start()] + str((int(match[0]) + 1) % 10) + content[match.end() :])
        if name.startswith("state"):  # the checkpoint before it is intact
            shutil.copytree(
                run_folder / "state", root / "state", dirs_exist_ok=True, ignore=shutil.ignore_patterns(path.name)
            )
            assert resume(root) == (RESULT, STATES[1])
            assert "its manifest b-000020.json is unreadable" in capsys.readouterr().err
            shutil.copytree(run_folder, root, dirs_exist_ok=True)
        else:
            with pytest.raises(
                RunError, match=f"{name} is damaged .*; (delete it to run stage a again|choose another --out)"
            ):
                resume(root)


def test_records_of_a_version_without_seals_are_read(run_folder, tmp_path):
    """And a sealed record whose word "seal" was damaged does not pass for one of them."""
    root = tmp_path / "run"
    shutil.copytree(run_folder, root)
    for path in [root / "config.json", *root.glob("stages/*.json"), *root.glob("state/*.json")]:
        record = json.loads(path.read_text())
        assert len(record.pop("seal")) == 64
        path.write_text(json.dumps(record, indent=1) + "\n")
    assert resume(root) == (RESULT, STATES[0])
    record = seal_record(json.loads((root / "stages/a.json").read_text()))
    (root / "stages/a.json").write_text(json.dumps(record).replace('"seal"', '"sea1"').replace("17", "18"))
    with pytest.raises(RunError, match="unknown key 'sea1'"):
        resume(root)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), JSON)
def test_a_seal_follows_the_content_alone(record, value):
    sealed = seal_record(record)
    assert (
        seal_record(json.loads(json.dumps(sealed, indent=3))) == sealed == seal_record(dict(reversed(sealed.items())))
    )
    changed = {**record, "x": value}
    assert (seal_record(changed)["seal"] == sealed["seal"]) == (
        json.dumps(changed, sort_keys=True) == json.dumps(record, sort_keys=True)
    )


@settings(max_examples=150)
@given(
    st.binary(max_size=40)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.integers(0, 2 * MAX_DEPTH).map(lambda n: b"[" * n + b"]" * n)
)
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
@example(b"9" * 5000)
def test_ref_and_kit_parse_alike(content):
    """A JSON value, or a ValueError of one line; never a RecursionError."""
    outcomes = []
    for parse in (lambda: parse_json(content.decode()), lambda: checks.parse_json(content.decode())):
        try:
            outcomes.append(json.dumps(parse()))
        except ValueError as error:
            assert "\n" not in str(error)
            outcomes.append(ValueError)
    assert outcomes[0] == outcomes[1]


def test_limits(tmp_path):
    """Bytes, nesting, encoding and kinds of file."""
    with pytest.raises(ValueError, match="it has more than 3 bytes"):
        parse_json("[1, 2]", limit=3)
    for text in ("x = " + "[" * 5000, "a." * 200 + "a = 1", "x = \n", "x = " + "9" * 5000):
        with pytest.raises(ValueError):
            parse_toml(text)
    path = tmp_path / "file"
    for content, reason in (
        (b"\xff", "not valid UTF-8"),
        (b"[" * 10**5, "nested deeper than 100"),
        (b"[1]", "not a JSON object|unexpected"),
        (b"", "JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(DamagedFile, match=f"{path} is damaged .*({reason}).*; restore or delete it$"):
            read_json(path)
    path.write_bytes(b'\xef\xbb\xbf{"a": [1]}')
    assert read_json(path, {"a": [int]}) == {"a": [1]}
    with pytest.raises(DamagedFile, match="a: 0: unexpected value 1"):
        read_json(path, {"a": [str]})
    path.write_bytes(b"\xe9 = 1")
    for read in (read_text, read_toml):
        with pytest.raises(DamagedFile, match="UTF-8"):
            read(path)
    for read in (read_bytes, read_text, read_json, read_lines):
        with pytest.raises(DamagedFile, match="/dev/zero is damaged .it is not a regular file"):
            read(Path("/dev/zero"))
        with pytest.raises(OSError):
            read(tmp_path)
    with pytest.raises(DamagedFile, match="more than 1,048,576 bytes"):
        read_toml("/dev/zero")
    path.write_text('{"a": 1}\n' + "[" * 10**5 + '\n{"b": 2}\n{"c"')
    assert read_lines(path) == [{"a": 1}, {"b": 2}]


# ------------------------------------------------------------------------------------------------ commands


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """A finished run of a technique."""
    from etude import catalog
    from etude.run import technique as technique_run

    root = tmp_path_factory.mktemp("demo") / "kl"
    entry = catalog.find("kl")
    assert entry is not None
    technique_run.play_technique(entry, root, {}, [], False, 20.0)
    return root


def ends_well(code: int, error: str) -> bool:
    """Success, or one line."""
    return code == 0 or code == 2 and error.count("\n") == 1 and error.startswith("error: ") and len(error) < 10_000


def test_commands_on_damaged_files(demo_run, tmp_path, monkeypatch, ask):
    """`run --resume`, `claims` and the explorer's list, each on files that were damaged at random."""
    rng = random.Random(7)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "claims").mkdir()
    for name, text in {
        "deep": "[" * 100_000,
        "typed": '{"technique": ["kl"], "config": 3, "machine": []}',
    }.items():  # other runs, which `run` reads
        (tmp_path / "runs" / name / "stages").mkdir(parents=True)
        for path in ("config.json", "report.json", "stages/demo.json", "timings.jsonl"):
            (tmp_path / "runs" / name / path).write_text(text)
    committed = (figures.COMMITTED.parent / "figures" / "kl-variance.json").read_bytes()
    for number in range(12):
        root = tmp_path / "runs" / f"kl{number}"
        shutil.copytree(demo_run, root)
        path = rng.choice(sorted(path for path in root.rglob("*.json*")))
        path.write_bytes(damage(rng, path.read_bytes()))
        code, _, error = ask("run", "kl", "--out", root, "--resume")
        assert ends_well(code, error), (path, error)
        record = tmp_path / "claims" / "kl-variance.json"
        record.write_bytes(damage(rng, committed))
        code, _, error = ask("claims", record.parent, "--out", tmp_path / "all.json")
        assert ends_well(code, error), (record.read_bytes()[:500], error)
    shutil.copytree(figures.COMMITTED.parent / "examples" / "recipe", tmp_path / "runs" / "recipe")
    monkeypatch.setattr(provenance, "RUNS", tmp_path / "runs")
    files = sorted(path for path in (tmp_path / "runs" / "recipe").rglob("*.json*"))
    for _ in range(40):
        path = rng.choice(files)
        content = path.read_bytes()
        path.write_bytes(damage(rng, content))
        for kind in provenance.KINDS:
            _, broken = run_files.load_runs(provenance.folders(kind))
            assert all("\n" not in line for line in broken)
        provenance.finished()
        provenance.recorded(provenance.newest(figures.COMMITTED.parent / "figures" / "kl-variance.json"))
        path.write_bytes(content)


def test_an_agent_of_damaged_files_plays_or_is_refused(tmp_path, ask):
    """The files of a checkpoint, headers of safetensors among them."""
    from etude.play.play import FOLDER

    rng, root = random.Random(3), tmp_path / "agent"
    shutil.copytree(FOLDER, root, ignore=shutil.ignore_patterns("sft"))
    files = [root / name for name in ("config.json", "tokenizer.json", "record.json", "model.safetensors")]
    for number in range(12):
        path = files[number % len(files)]
        content = path.read_bytes()
        header = damage(rng, content[:4000]) + content[4000:] if path.suffix == ".safetensors" else damage(rng, content)
        path.write_bytes(header)
        code, _, error = ask("play", root, "--json", "--task", "1", "--seed", "0")
        assert ends_well(code, error), (path, error)
        path.write_bytes(content)
