"""Experiments from the command line: run in a run folder, write PNG, CSV and JSON, collect the claims in one table."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import difflib
import importlib
import io
import json
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from etude import catalog
from etude.console import expected
from etude.ledger import fingerprints
from etude.ledger.claim_shape import CLAIMS, RECORD, STORED_CLAIMS
from etude.ledger.qualifications import qualified
from etude.ledger.statements import coverage, open_statements
from kit.disk import atomic_write, describe_mismatch, parse_json, read_bytes, read_json, seal_record
from kit.process import machine
from kit.runs import Run, flatten
from kit.settings import RunError, fill
from sims.experiment import is_law, judge

__all__ = [
    "as_csv",
    "bound",
    "broken_laws",
    "cell",
    "claims_of",
    "contradiction",
    "format_counts",
    "covered",
    "gather",
    "laws",
    "load",
    "markdown",
    "markdown_laws",
    "markdown_open",
    "format_measured_value",
    "of_sources",
    "play",
    "ruled",
    "show",
    "show_open",
    "show_quick",
    "show_summary",
    "worded",
]


CLAIM = {
    "name",
    "claim",
    "source",
    "measured",
    "interval",
    "unit",
    "rule",
    "needs",
    "verdict",
    "note",
    "experiment",
    "command",
}
"""Keys of every claim in the file."""


COMMITTED = Path(__file__).resolve().parents[2] / "results" / "claims.json"
"""The committed claims, decided by the full experiments."""
LOCAL_CLAIMS = Path("results") / "claims.json"
"""The claims of the current folder; in a clone they are the committed ones."""


def play(
    entry: catalog.Experiment, out: Path, toml: dict, sets: Iterable[str], quick: bool, resume: bool, cadence: float
) -> dict:
    """Runs or resumes an experiment in the run folder `out` and writes NAME.png, NAME.csv and NAME.json there.

    Returns the content of NAME.json. Raises RunError as `Run.open` and `fill` do."""
    module = importlib.import_module(entry.module)
    base = dataclasses.asdict(module.Experiment.quick()) if quick else {}
    config = fill(module.Experiment, _merge_settings(base, toml), sets)
    resume_command = f"etude figure {entry.name} --out {shlex.quote(str(out))} --resume"
    with Run.open(out, f"figure {entry.name}", config, resume, cadence) as run, run.report_interruption(resume_command):
        code = _check_code(run, entry)
        expected.tell(run)
        results = module.experiment(run, config)
        config_values = read_json(out / "config.json")["config"]
        command, quick = command_of(entry.name, module.Experiment, config_values)
        record = {
            "experiment": entry.name,
            "title": entry.title,
            "source": entry.source,
            "command": command,
            "quick": quick,
            "config": config_values,
            "machine": machine(),
            "seconds": run.seconds(),
            **results,
            **code,
        }
        record = seal_record(record)
        for claim in results["claims"]:
            if wrong := contradiction(claim):
                raise ValueError(wrong)
        atomic_write(out / f"{entry.name}.csv", as_csv(results["rows"]))
        module.picture(record, out / f"{entry.name}.png")
        atomic_write(out / f"{entry.name}.json", json.dumps(record, indent=1) + "\n")
    return record


def _check_code(run: Run, entry: catalog.Experiment) -> dict:
    """The fingerprints of the code that measures. Raises RunError if they have changed since the run first started."""
    path, code = run.root / "code.json", fingerprints.fingerprints(entry.sim)
    if path.exists():
        if changes := fingerprints.stale_reasons(read_json(path), entry.sim):
            raise RunError(
                f"{run.root} was started with other code ({'; '.join(changes)}); run {entry.name} "
                f"again in another folder"
            )
    else:
        atomic_write(path, json.dumps(code, indent=1) + "\n")
    return code


def _merge_settings(base: dict, toml: dict) -> dict:
    def get_table(key: str) -> dict:
        return base[key] if isinstance(base.get(key), dict) else {}

    return {**base, **{k: _merge_settings(get_table(k), v) if isinstance(v, dict) else v for k, v in toml.items()}}


def command_of(name: str, settings: type, config: dict) -> tuple[str, bool]:
    """The shortest command that runs an experiment with these settings, and whether it has --quick. It follows from the
    settings, not from the command that was typed, because another command may have resumed that run."""

    def format_value(value: Any) -> str:
        if isinstance(value, list):
            return ",".join(map(format_value, value))
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    with contextlib.suppress(RunError):  # settings of before, by the names that they have now
        config = parse_json(json.dumps(dataclasses.asdict(fill(settings, config))))
    flat_config, commands = flatten(config), []
    for quick, base in ((False, settings()), (True, settings.quick())):
        plain = flatten(parse_json(json.dumps(dataclasses.asdict(base))))
        sets = [
            f"--set {shlex.quote(f'{key}={format_value(value)}')}"
            for key, value in flat_config.items()
            if key not in plain or plain[key] != value
        ]
        commands.append((len(sets), quick, " ".join([f"etude figure {name}", *(["--quick"] if quick else []), *sets])))
    _, quick, command = min(commands)
    return command, quick


def as_csv(rows: Sequence[dict]) -> str:
    """Rows as CSV text; columns in order of first appearance."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def gather(folders: Iterable[Path], out: Path) -> list[dict]:
    """Writes the verdicts of finished experiments to the JSON file `out` and copies their pictures, tables and records
    to figures/ next to it. Verdicts of other experiments stay in the file, unless every experiment is given. Returns
    all claims in the catalogue's order.

    A folder may hold several records: `etude claims results/figures` recomputes every verdict from the committed
    records. Raises RunError for a folder without a finished experiment, and for an experiment that ran with --quick."""
    entries = {entry.name: entry for entry in catalog.EXPERIMENTS}
    new = {}
    for folder, record in ((path, record) for path in map(Path, folders) for record in _records(path)):
        if wrong := describe_mismatch(record, RECORD):
            raise RunError(
                f"{folder} contains a damaged record of {record['experiment']} ({wrong}); run the experiment again"
            )
        if record["quick"]:
            raise RunError(f"{folder} comes from a run with --quick, which gives no verdicts; run it without --quick")
        if record["experiment"] not in entries:
            raise RunError(f"{folder} contains {record['experiment']}, which is not an experiment of this version")
        new[record["experiment"]] = folder, record, _claims_of(folder, record)
    claims = (
        [claim for claim in load(out) if claim["experiment"] not in new]
        if out.exists() and new.keys() != entries.keys()
        else []
    )
    for name, (folder, record, new_claims) in new.items():
        (out.parent / "figures").mkdir(parents=True, exist_ok=True)
        for ending in ("png", "csv", "json"):
            source, target = folder / f"{name}.{ending}", out.parent / "figures" / f"{name}.{ending}"
            if not (target.exists() and source.samefile(target)):
                shutil.copyfile(source, target)
        facts = {
            "experiment": name,
            "command": record["command"],
            "seed": record["config"]["seed"],
            "machine": {k: record["machine"][k] for k in ("cpu", "threads", "torch", "commit")},
            "seconds": round(sum(record["seconds"].values()), 1),
        }
        claims += [rounded(claim | facts) for claim in new_claims]
    order = list(entries)
    claims.sort(key=lambda claim: order.index(claim["experiment"]) if claim["experiment"] in order else len(order))
    atomic_write(out, json.dumps(claims, indent=1, ensure_ascii=False) + "\n")
    return claims


def rounded(value: Any) -> Any:
    """The same with every number at ten digits. The last digits of a sum depend on the machine, and the ledger should
    not."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def claims_of(record: dict) -> list[dict]:
    """The claims of a record as the ledger shows them. If the code that measured or judged them has changed since,
    their verdict is "stale"."""
    entry = catalog.find_experiment(record["experiment"])
    reasons = fingerprints.stale_reasons(record, entry.sim) if entry else []
    if not fingerprints.is_recorded(record):
        return [claim | {"unrecorded": True} for claim in record["claims"]]
    if not reasons:
        return record["claims"]
    reason = f"stale: {'; '.join(reasons)}"
    return [
        claim | {"verdict": "stale", "note": "; ".join(filter(None, (reason, claim["note"])))}
        for claim in record["claims"]
    ]


def _claims_of(folder: Path, record: dict) -> list[dict]:
    try:
        wrong = describe_mismatch(record["claims"], CLAIMS) or next(
            filter(None, map(contradiction, record["claims"])), None
        )
        claims = [] if wrong else claims_of(record)
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        raise RunError(
            f"{folder} contains claims that this version cannot judge ({wrong}); run {record['experiment']} again"
        )
    if not fingerprints.is_sealed(record):
        raise RunError(
            f"{folder} contains a record of {record['experiment']} that was changed after it was "
            f"written; run {record['experiment']} again"
        )
    return claims


def contradiction(claim: dict) -> str | None:
    """The error message if a claim's verdict does not follow from its rule, else None. Raises ValueError for an invalid
    rule."""
    right = judge(claim["rule"], claim["measured"], claim["interval"], claim["needs"])
    return (
        None
        if claim["verdict"] in (right, "stale")
        else f"by its rule {claim['name']} is {right!r}, not {claim['verdict']!r}"
    )


def find_claims_file() -> Path:
    """The default file of claims: the current folder's, or else that of the clone that contains this code."""
    return COMMITTED if COMMITTED.exists() and not LOCAL_CLAIMS.exists() else LOCAL_CLAIMS


def load(path: Path) -> list[dict]:
    """The claims in a file that `gather` wrote. Raises RunError if the file is missing or damaged."""
    try:
        claims = read_json(path, STORED_CLAIMS)
        if not isinstance(claims, list) or not all(
            isinstance(claim, dict) and CLAIM <= claim.keys() for claim in claims
        ):
            raise ValueError("it does not contain claims in the format that etude claims writes")
        if wrong := next(filter(None, map(contradiction, claims)), None):
            raise ValueError(wrong)
        return claims
    except FileNotFoundError:
        raise RunError(
            f"{path} does not exist; run experiments with etude figure, then pass their folders to "
            f"etude claims; a clone contains the committed file"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{path} is damaged ({error}); restore it, or rebuild it with: etude claims results/figures"
        ) from None


def _records(folder: Path) -> list[dict]:
    records = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        if path.name != "config.json":
            try:
                record = parse_json(read_bytes(path))  # `gather` says which record does not match its seal
                if record.get("experiment") == path.stem and "claims" in record:
                    records.append(record)
            except (ValueError, AttributeError):
                pass
    if not records:
        raise RunError(f"{folder} contains no finished experiment; run one with: etude figure NAME")
    return records


def of_sources(claims: Iterable[dict]) -> list[dict]:
    """The claims that are measured against their sources."""
    return [claim for claim in claims if not is_law(claim["rule"])]


def laws(claims: Iterable[dict]) -> list[dict]:
    """The claims that are laws: closed forms and identities."""
    return [claim for claim in claims if is_law(claim["rule"])]


def format_measured_value(claim: dict[str, Any]) -> str:
    """The measured value with its interval, for a table cell; a dash if the claim is not tested."""
    if claim["measured"] is None or claim["verdict"] == "not tested":
        return "–"
    unit = f" {claim['unit']}" if claim["unit"] else ""
    low_high = f" [{claim['interval'][0]:.3g}, {claim['interval'][1]:.3g}]" if claim["interval"] else ""
    return f"{claim['measured']:.3g}{low_high}{unit}"


def bound(law: dict) -> str:
    """The allowed deviation from a law, for a table cell."""
    return f"{law['rule']['kind']} {law['rule']['bound']:.3g}"


def ruled(claim: dict) -> str:
    """The rule of a claim and its further conditions in words, for a table cell."""
    rule = claim["rule"]
    if rule["kind"] == "between":
        words = f"between {rule['low']:g} and {rule['high']:g}"
    elif rule["kind"] in ("above", "below"):
        words = f"{rule['kind']} {rule['null']:g}" + (
            f", as far as {rule['amount']:g}" if rule["amount"] is not None else ""
        )
    else:
        words = bound(claim) if is_law(rule) else "none applies"
    return "; ".join([words, *(f"{need}: {'yes' if is_met else 'no'}" for need, is_met in claim["needs"].items())])


def covered(claims: list[dict]) -> str:
    """One line: how many of the sources' statements are tested."""
    tested, by_laws, every = coverage(claims)
    return (
        f"{tested} of the sources' {every} testable statements are tested, {by_laws} of them by laws alone "
        f"({tested / every:.0%})."
    )


COLOURS = {
    "reproduced": "green",
    "partly": "yellow",
    "contradicted": "red",
    "not at this scale": "magenta",
    "not tested": "dim",
    "holds": "green",
    "broken": "red",
    "stale": "dim",
}


def show(claims: list[dict]) -> None:
    """Prints a table of claims, the notes of those that did not reproduce, and a table of laws."""
    print_table(
        ("name", "claim", "source", "measured", "verdict"),
        [
            (name_of(claim), qualified(claim), claim["source"], format_measured_value(claim), worded(claim))
            for claim in of_sources(claims)
        ],
    )
    for claim in of_sources(claims):
        if claim["note"] and claim["verdict"] != "reproduced":
            print_note(claim)
    print_table(
        ("name", "law", "source", "deviation", "bound", "verdict"),
        [
            (name_of(law), qualified(law), law["source"], format_measured_value(law), bound(law), worded(law))
            for law in laws(claims)
        ],
    )


def name_of(claim: dict) -> str:
    """EXPERIMENT/CLAIM, or the claim's name alone if it names no experiment."""
    return "/".join(filter(None, (claim.get("experiment"), claim["name"])))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; nothing if it has no rows. The first column, a name, is left out on a terminal. Elsewhere, as in
    a pipe, each row is one line with tabs between its cells, whatever the width of the window."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    if not sys.stdout.isatty():
        print(*("\t".join(row) for row in (head, *rows)), sep="\n")
        return
    table = Table(*head[1:], box=None, header_style="bold", pad_edge=False)
    for _, *cells, last in rows:
        table.add_row(*map(Text, cells), Text(last, COLOURS.get(last.partition(",")[0], "")))
    Console().print(table)


def print_note(claim: dict) -> None:
    """Prints the rule and the note of a claim; one line if the output is not a terminal."""
    from rich.console import Console
    from rich.text import Text

    note = f" ({ruled(claim)}): {claim['note']}"
    if sys.stdout.isatty():
        Console().print(Text.assemble((claim["name"], "bold"), note))
    else:
        print(name_of(claim) + note)


def select_claims(claims: list[dict], verdict: str | None, experiment: str | None) -> list[dict]:
    """The claims and laws with this verdict, of this experiment; None selects all. Raises RunError if there is no such
    verdict or experiment."""
    if verdict is not None and verdict not in COLOURS:
        raise RunError(f"unknown verdict {verdict!r}; {suggest(verdict, COLOURS)}")
    experiments = list(dict.fromkeys(claim["experiment"] for claim in claims))
    name = None if experiment is None else experiment.replace("_", "-")
    if name is not None and name not in experiments:
        raise RunError(f"no claims of {experiment!r}; {suggest(name, experiments)}")
    return [claim for claim in claims if verdict in (None, claim["verdict"]) and name in (None, claim["experiment"])]


def suggest(word: str, names: Iterable[str]) -> str:
    """The closest of the names as a question, if one is close, and all of them."""
    names = list(names)
    closest = difflib.get_close_matches(word, names, n=1)
    return f"{f'did you mean {closest[0]}? Choose' if closest else 'choose'} from: {', '.join(names)}"


def show_summary(claims: list[dict]) -> None:
    """Prints how many claims and laws have which verdict, in total and in one line per experiment, which also says if a
    law is broken or a row stale."""
    show_total(claims)
    stale, late, unrecorded = (
        (sum(map(bool, flags)) for flags in zip(*map(flags_of, claims), strict=True)) if claims else (0, 0, 0)
    )
    print(f"{stale} stale; {late} with a rule written after the measurement; {unrecorded} without a record of the code")
    print(covered(claims))
    by_experiment: dict[str, list[dict]] = {}
    for claim in claims:
        by_experiment.setdefault(claim["experiment"], []).append(claim)
    if not by_experiment:
        return
    width = max(len("experiment"), *map(len, by_experiment))
    print(f"\n{'experiment':{width}}  {'state':6}  claims and laws")
    for experiment, rows in by_experiment.items():
        print(f"{experiment:{width}}  {state_of(rows):6}  {format_counts(rows)}")
    print("\nAll claims of an experiment: etude claims --figure NAME. All claims: etude claims --all")


def flags_of(claim: dict) -> tuple[bool, bool, bool]:
    """Whether a claim is stale, its rule was written after the measurement, and its record does not name the code."""
    return claim["verdict"] == "stale", bool(claim.get("after_the_fact")), bool(claim.get("unrecorded"))


def state_of(claims: list[dict]) -> str:
    """The worst state of an experiment's claims and laws: broken, stale, or ok."""
    verdicts = {claim["verdict"] for claim in claims}
    return next((state for state in ("broken", "stale") if state in verdicts), "ok")


def show_total(claims: list[dict]) -> None:
    """Prints how many claims and laws there are of each verdict."""
    for kind, group in (("claims", of_sources(claims)), ("laws", laws(claims))):
        print(format_total(kind, group))


def format_total(kind: str, group: list[dict]) -> str:
    """The number of claims or laws, in all and by verdict, such as `3 claims: 2 reproduced, 1 partly`."""
    count = Counter(claim["verdict"] for claim in group)
    verdict_counts = ", ".join(f"{count[verdict]} {verdict}" for verdict in COLOURS if count[verdict])
    return f"{len(group)} {kind if len(group) != 1 else kind[:-1]}{': ' if verdict_counts else ''}{verdict_counts}"


def format_counts(claims: list[dict]) -> str:
    """The numbers of an experiment's claims and laws by verdict, in one line."""
    return "; ".join(
        format_total(kind, group) for kind, group in (("claims", of_sources(claims)), ("laws", laws(claims))) if group
    )


def show_open(claims: list[dict]) -> None:
    """Prints the statements that are not tested, with the reasons, and the share that is tested."""
    rows = [
        (statement.name, statement.says, statement.section, reason) for statement, reason in open_statements(claims)
    ]
    print_table(("name", "not tested", "source", "why"), rows)
    print(covered(claims))


def show_quick(experiment: str, claims: list[dict], full: Path) -> None:
    """Prints what --quick measured next to each claim in the file `full`. A quick run decides nothing but laws, which
    hold at any size."""
    from rich.console import Console
    from rich.table import Table

    try:
        full_claims = {claim["name"]: claim for claim in load(full) if claim["experiment"] == experiment}
    except RunError:
        full_claims = {}
    table = Table(
        "claim",
        "source",
        "measured, quick",
        "verdict",
        "full: measured",
        "full: verdict",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for claim in claims:
        full_claim = full_claims.get(claim["name"])
        quick_verdict = claim["verdict"] if is_law(claim["rule"]) else "quick: no verdict"
        full_cells = (format_measured_value(full_claim), worded(full_claim)) if full_claim else ("–", "–")
        table.add_row(claim["claim"], claim["source"], format_measured_value(claim), quick_verdict, *full_cells)
    console = Console()
    console.print(table)
    console.print(
        f"--quick only checks that the code runs, and gives no verdicts. The full experiment does: "
        f"etude figure {experiment}",
        highlight=False,
    )


def worded(claim: dict) -> str:
    """A claim's verdict, whether its rule came after its data, and whether its record says which code measured it."""
    late, unrecorded = claim.get("after_the_fact"), claim.get("unrecorded")
    return claim["verdict"] + (", after the fact" if late else "") + (", code not recorded" if unrecorded else "")


def broken_laws(claims: Iterable[dict]) -> list[str]:
    """The laws that are broken, each with its deviation and bound."""
    return [
        f"{law['name']} ({format_measured_value(law)}, {bound(law)})"
        for law in laws(claims)
        if law["verdict"] == "broken"
    ]


def cell(text: str) -> str:
    """Text for a cell of a Markdown table, where a bar would end it."""
    return text.replace("|", "\\|")


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell(part) for part in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(claims: list[dict]) -> str:
    """The table of claims as Markdown."""
    rows = [
        (qualified(c), c["source"], format_measured_value(c), worded(c), f"`{c['command']}`")
        for c in of_sources(claims)
    ]
    return _markdown(("claim", "source", "measured", "verdict", "command"), rows)


def markdown_laws(claims: list[dict]) -> str:
    """The table of laws as Markdown."""
    rows = [
        (qualified(c), c["source"], format_measured_value(c), bound(c), worded(c), f"`{c['command']}`")
        for c in laws(claims)
    ]
    return _markdown(("law", "source", "deviation", "bound", "", "command"), rows)


def markdown_open(claims: list[dict]) -> str:
    """The table of statements that are not tested, as Markdown."""
    return _markdown(
        ("statement", "source", "why"), [(s.says, s.section, reason) for s, reason in open_statements(claims)]
    )
