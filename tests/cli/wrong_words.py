"""Wrong invocations of every command: a seeded generator of words, and the files that they name. Each has at least
one fault that must be refused before any work begins."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

__all__ = ["invocations", "lay_files"]

NUMBERS = ("x", "1.5", "", " ", "1e99", "nan", "1,2", "0x10", "½", "-", "9" * 5000, "true", "1_0", "١٠", "１０")
"""No whole numbers."""
NEGATIVE = ("-1", "-999999999999999999999")
DECIMALS = ("x", "", " ", "nan", "-inf", "1e999", "1,5", "½", "-1", "0x1p3", "1_0.5", "١٫٥")
"""No finite decimal numbers of at least 0."""
ABSENT = (
    "missing",
    "missing/below",
    "text.bin/below",
    "n" * 300,
    "",
    "link",
    "loop",
    "caf\udce9",
    "a\0b",
    "/dev/null/x",
)
"""Paths at which nothing can be read."""
FOLDERS = ("folder", ".", "/")
"""Folders without what a command looks for."""
FILES = ("text.bin", "empty.json", "deep.json", "list.json", "latin.toml", "half.json")
"""Files that hold something else than what a command looks for."""
TOMLS = ("half.toml", "deep.toml", "keys.toml", "latin.toml", "text.bin", "list.toml", "table.toml", "folder", *ABSENT)
PLACES = (
    "text.bin",
    "text.bin/below",
    "folder",
    "/dev/null",
    "/dev/null/x",
    "/proc/etude",
    "n" * 300,
    "a\0b",
    "loop",
    "loop/below",
    "caf\udce9",
)
"""Where no run can be written."""
NAMES = (
    "zebra",
    "",
    " ",
    "KL ",
    "kl/../kl",
    "-",
    "½",
    "a\0b",
    "caf\udce9",
    "k" * 5000,
    "run",
    "1e9",
    "../..",
    "recipe\nkl",
)
SETS = (
    *(
        "seed",
        "=",
        "=1",
        "",
        "x=1",
        "a.b.c=1",
        ".=1",
        "..=",
        "seed.x=1",
        f"{'a.' * 3000}b=1",
        "seed=1=2",
        "\0=1",
        "seed=\udce9",
        "séed=1",
    ),
    *(f"seed={word}" for word in NUMBERS),
)
RECIPE_SETS = (
    "rl.steps=1e99",
    "rl.steps=-1",
    "rl.steps=1_0",
    "rl.steps=١٠",
    "rl=1",
    "rl.rollouts=1e400",
    "sft.depth_mix=1,2,",
    "model.hidden_size=none",
)
UNNAMED = (
    "",
    " ",
    "a b",
    "x==",
    "==1",
    "missing/below",
    "text.bin/below",
    "a\0b",
    "caf\udce9",
    "/dev/null/x",
    "text.bin",
    "-",
    "folder",
    "½",
)
"""No names of packages: of one that could be a name, the index would be asked."""
RUNS = ("deep", "shapes", "strings", "lists", "half", "hollow")
"""Folders below `runs` that look like runs and are damaged."""


def lay_files(root: Path) -> None:
    """Writes the files and folders that `invocations` names into `root`."""
    (root / "folder").mkdir()
    (root / "folder" / "thesis.tex").write_text("precious")
    contents = {
        "text.bin": bytes(range(256)) * 20,
        "empty.json": b"",
        "deep.json": b"[" * 100_000,
        "list.json": b"[1]",
        "half.json": b'{"technique": "recipe", "con',
        "half.toml": b"seed = = 1",
        "deep.toml": b"x = " + b"[" * 100_000,
        "keys.toml": b"a." * 5000 + b"a = 1",
        "latin.toml": b'name = "\xe9"',
        "list.toml": b"seed = [[1]]\nsource = 3",
        "table.toml": b'[seed]\nx = "a\\u0000b"\n[[source]]\npath = 3',
    }
    for name, content in contents.items():
        (root / name).write_bytes(content)
    (root / "link").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    configs = {
        "deep": "[" * 100_000,
        "shapes": json.dumps({"technique": "recipe", "config": [1], "machine": 3}),
        "strings": json.dumps({"technique": 3, "config": "x"}),
        "lists": "[]",
        "half": '{"technique": "rec',
        "hollow": json.dumps({"technique": "recipe", "config": {}}),
    }
    for name, text in configs.items():
        folder = root / "runs" / name
        for part in ("stages", "state", "metrics", "data", "checkpoints/final"):
            (folder / part).mkdir(parents=True)
        (folder / "config.json").write_text(text)
        for path in (
            "stages/eval.json",
            "stages/data.json",
            "checkpoints/final/config.json",
            "data/tokenizer.json",
            "report.json",
        ):
            (folder / path).write_text(text)
        (folder / "checkpoints" / "final" / "model.safetensors").write_bytes(b"\xff" * 64)


Faults = tuple[str, tuple[str, ...]]
"""An option or, where it is empty, an argument, and its wrong values."""


def commands() -> list[tuple[list[str], list[Faults]]]:
    """Every command with the words that it needs, and the faults that can be added to them."""
    out, number, decimal, toml, wrong_set = ("--out", PLACES), NUMBERS, DECIMALS, ("--config", TOMLS), ("--set", SETS)
    runs, read = tuple(f"runs/{name}" for name in RUNS), (*ABSENT, *FOLDERS, *FILES)
    trained = [
        wrong_set,
        toml,
        ("--seed", (*number, *NEGATIVE)),
        ("--checkpoint-seconds", decimal),
        ("--log", NAMES),
        out,
    ]
    sandboxes = [("--jobs", (*number, "0")), ("--seconds", decimal), ("--sandbox", NAMES)]
    services = [
        ("--nproc", number),
        ("--nodes", (*number, "0", "2")),
        ("--node", (*number, "0")),
        ("--rendezvous", (*NAMES, "host:29500")),
        ("--scale", NAMES),
        ("--backend", NAMES),
        ("--corpus", read[:-6]),
        ("--checkpoint", read),
    ]
    return [
        (["run"], [("", NAMES)]),
        (["run", "kl"], [*trained, *services, ("--out", runs)]),
        (["run", "recipe"], [*trained, ("--set", RECIPE_SETS), ("--out", runs), ("--corpus", ABSENT)]),
        (["run", "recipe", "--resume"], [("--out", (*runs, *PLACES))]),
        (["run", "recipe", "--resume-or-begin"], [("--out", PLACES), ("--resume", ("--resume",))]),
        (
            ["run", "recipe", "--scale", "full", "--backend", "gloo", "--checkpoint", "runs/hollow/checkpoints/final"],
            [("--tasks", read)],
        ),
        (
            ["run", "cpt", "--scale", "full", "--backend", "gloo"],
            [("--checkpoint", read), ("--nproc", (*number, "0", "-1")), ("--corpus", ABSENT), wrong_set],
        ),
        (
            ["run", "cpt", "--scale", "full", "--backend", "gloo", "--nodes", "2", "--node", "1"],
            [("--rendezvous", (*NAMES, "host", "host:0", "host:65536", ":29500", "::1:29500", "host:29500:1"))],
        ),
        (
            ["run", "async-rl"],
            [
                ("--runtime", NAMES),
                ("--engine", NAMES),
                ("--set", ("checkpoint=missing", "checkpoint=folder", "services=x")),
            ],
        ),
        (["figure"], [("", NAMES)]),
        (["figure", "kl-variance", "--quick"], [*trained, ("--out", runs)]),
        (["figure", "best-of-k", "--resume"], [("--out", runs)]),
        (["data", "list.toml"], [("--out", PLACES), ("--processes", (*number, "0"))]),
        (["data", "--out", "new"], [("", TOMLS)]),
        (
            ["plan"],
            [
                ("--gpus", (*number, "0")),
                ("--cp", (*number, "0", "3")),
                ("--ep", (*number, "0")),
                ("--length", (*number, "0", "33")),
            ],
        ),
        (
            ["plan"],
            [
                ("--rows", (*number, "0")),
                ("--hardware", NAMES),
                ("--model", read),
                ("--recipe", TOMLS),
                ("--launches", NAMES),
            ],
        ),
        (["plan", "--recipe", "table.toml"], [("--checkpoint", read), ("--tasks", read), wrong_set]),
        (["plan"], [("--tasks", read)]),
        (["results"], [("", (*runs, *read))]),
        (["export-sft", "--out", "sft.jsonl"], [("", (*runs, *read))]),
        (
            ["claims"],
            [
                ("", (*runs, *read)),
                ("--out", (*ABSENT[:2], *FILES, "folder", "a\0b")),
                ("--verdict", NAMES[:4]),
                ("--figure", NAMES[:4]),
            ],
        ),
        (["examples"], [("--run", (*runs, *read))]),
        (["explore"], [("--port", (*number, "0", "65536"))]),
        (["lesson"], [("", (*number, "99", "-1"))]),
        (["challenge"], [("", (*number, "99"))]),
        (["challenge", "5"], [("--seed", (*number, *NEGATIVE)), ("", FILES)]),
        (["challenge", "5", "--score"], [("", read)]),
        (["glossary"], [("", tuple(name for name in NAMES if name.strip() != "KL"))]),  # the glossary folds white space
        (["kernels"], [("--target", NAMES), ("--show", NAMES)]),
        (["show"], [("", (*read, "runs/deep/config.json"))]),
        (["show", "list.json"], [("--rows", number)]),
        (
            ["play"],
            [
                ("", (*runs, *read)),
                ("--before", NAMES),
                ("--task", number),
                ("--seed", number),
                ("--temperature", decimal),
            ],
        ),
        (["eval"], [("", (*runs, *read))]),
        (
            ["eval", "agent"],
            [("--tasks", (*number, "0")), ("--samples", (*number, "65")), ("--seed", number), ("--before", NAMES)],
        ),
        (["eval", "base"], [("", read)]),
        (
            ["eval", "base", "runs/hollow/checkpoints/final"],
            [("--codebase", read), wrong_set, toml, out, ("--checkpoint-seconds", decimal)],
        ),
        (["tasks", "make"], [("", UNNAMED)]),
        (["tasks", "make", "a b"], [*sandboxes, ("--join", (*number, "0"))]),
        (["tasks", "check"], [("", (*read, "runs/deep/config.json"))]),
        (["tasks", "check", "list.json"], [*sandboxes]),
        (["tasks", "export", "list.json"], [("--format", NAMES), out]),
        (["tasks", "install"], [("", ABSENT)]),
        (
            ["tasks", "install", "folder"],
            [("--replay", read), ("--tries", (*number, "0")), ("--minutes", decimal), ("--turns", number)],
        ),
        (["tasks", "demonstrate"], [("", read)]),
        (["tasks", "demonstrate", "list.json"], [*sandboxes, ("--styles", NAMES), ("--prompt", NAMES), out]),
        (["tasks", "levels"], [("", read), ("--number", (*number, "0"))]),
        (["tasks", "levels", "list.json"], [("--level", (*number, "-1"))]),
        (
            ["tasks", "try", "zebra", "--model", "oracle"],
            [("--recipes", read), ("--turns", (*number, "0")), ("--context", (*number, "3"))],
        ),
        (
            ["tasks", "try", "zebra", "--model", "oracle"],
            [("--prompt", NAMES), ("--tool-choice", NAMES), ("--corpus", ABSENT), ("--temperature", decimal)],
        ),
        (["tasks", "grade", "zebra"], [("", read)]),
        (["tasks", "grade", "zebra", "folder"], [("--recipes", read)]),
        (["tasks", "serve", "zebra"], [("--recipes", read), ("--calls", (*number, "0")), ("--minutes", decimal)]),
        (["tasks", "hints"], [("", read)]),
        (["tasks", "hints", "list.json"], [("--source", NAMES), ("--loss", read)]),
        (["bench"], [("", NAMES)]),
        (["bench", "data", "--archives", "folder"], [("--tokenizer", read)]),
        (["bench", "contention"], [("", (*runs, *read))]),
        (["bench", "engine"], [("", (*runs, *read))]),
        (
            ["bench", "step", "--model", "tiny"],
            [("--layers", (*number, "0")), ("--tokens", (*number, "1", "33")), ("--length", (*number, "1"))],
        ),
        (["bench", "step"], [("--model", read)]),
        (
            ["bench", "decode", "--model", "tiny"],
            [("--rows", (*number, "0")), ("--prompt", (*number, "0")), ("--new", (*number, "1"))],
        ),
        (
            ["bench", "packages"],
            [("--rollouts", (*number, "1")), ("--blocks", (*number, "-1")), ("--turn-tokens", (*number, "0"))],
        ),
        (["bench", "packages"], [("--max-len", (*number, "1")), ("--checkpoint", ABSENT), ("--tasks", read)]),
        ([], [("", NAMES)]),
    ]


def invocations(count: int, seed: int) -> Iterator[list[str]]:
    """`count` different wrong invocations: every command and option in turn, with values drawn from its faults;
    one in eight lacks the value of its option, has an option that no command has, or a second fault."""
    rng, seen = random.Random(seed), set[tuple[str, ...]]()
    faults = [(words, option, values) for words, options in commands() for option, values in options]
    while True:
        rng.shuffle(faults)
        for words, option, values in faults:
            value = rng.choice(values)
            invocation = [*words, *([option] if option else []), value]
            kind = rng.randrange(24)
            if kind == 0 and option:
                invocation = invocation[:-1]
            elif kind == 1:
                invocation = [
                    *words,
                    rng.choice(("--zebra", "-z", "--seed=", "--out=", "--\0")),
                    *invocation[len(words) :],
                ]
            elif kind == 2:
                invocation += ["--set", rng.choice(SETS)]
            if tuple(invocation) not in seen:
                seen.add(tuple(invocation))
                yield invocation
                if len(seen) == count:
                    return
