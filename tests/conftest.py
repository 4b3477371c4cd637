"""Runtime shape checking, deterministic kernels, and memory that is NaN until it is written."""

import fcntl
import os
import shutil
import signal
import sys
from collections import Counter

import hypothesis
import pytest
import torch

from tests import shape_checks

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
shape_checks.install()
# Where as many workers as cores run tests side by side, two threads in each would wait for each other in every product.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else max(1, min(2, os.cpu_count() or 1))
torch.set_num_threads(THREADS)
# No test is timed: beside other workers an example that takes 5 ms took 600.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")
# Both together make torch.empty hand out NaN: what reads memory that nobody wrote is seen.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True, scope="module")
def own_threads():
    """A run that a test plays in this process sets its threads, and they stay. With two of them in two workers, tests
    of a second took a minute."""
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    shape_checks.start_test()


@pytest.fixture(autouse=True)
def own_main(monkeypatch):
    """Streamlit's AppTest makes the page that it plays the main module, and leaves it there: every process begun later
    would play it first."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture
def interruptible():
    """Ctrl-C is Python's to hear. What a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def ask(capsys):
    """The command line in this process: ask(words…) gives exit code, stdout, stderr."""
    from etude.cli import main as cli

    def asked(*arguments: object) -> tuple[int, str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["etude", *map(str, arguments)])
            with pytest.raises(SystemExit) as left:
                cli.main()
        captured = capsys.readouterr()
        return left.value.code, captured.out, captured.err

    return asked


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A finished run of the recipe at its smallest, seed 0. For all tests of all workers together: who changes it
    copies it first."""
    from tests import forks

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker plays it; another that comes meanwhile waits
        if not (folder / "done").exists():
            forks.play(*forks.smallest(folder / "recipe"), said=folder / "said")
            (folder / "done").touch()
    return folder / "recipe"


LONG = (
    "mirror/test_chain.py",
    "mirror/test_ladder.py",
    "mirror/test_full.py",
    "sims/test_recipe.py",
    "cli/test_runs.py",
    "mirror/test_training.py",
    "app/test_browser.py",
    "mirror/test_network.py",
    "mirror/test_rl.py",
    "mirror/test_async_group.py",
    "mirror/test_async_command.py",
    "mirror/test_faults.py",
    "mirror/test_player.py",
    "kernels/test_compiled.py",
    "sims/test_self_summary.py",
    "sims/test_cpt_rl.py",
    "sims/test_length_penalty.py",
    "sims/test_router_mismatch.py",
    "sims/test_mtp_distillation.py",
    "sims/test_best_of_k.py",
    "sims/test_base_eval.py",
    "app/test_async_pages.py",
    "lessons/test_lessons.py",
)
"""Files that take a minute or more, the longest first: begun last, one of them would keep one core busy while the
others idle."""


def pytest_collection_modifyitems(items):
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get("/".join(item.path.parts[-2:]), len(LONG)))
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


NO_BUBBLEWRAP = "a sandbox needs bubblewrap, which is not installed"
"""How environments/sandbox/start.py begins its error."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Without bubblewrap a test that meets its error is skipped. Where it is installed, that error fails the test, and
    with ETUDE_SKIP_NOTHING always."""
    report = yield
    if report.failed and shutil.which("bwrap") is None and not os.environ.get("ETUDE_SKIP_NOTHING"):
        texts = [str(report.longrepr), *(text for _, text in report.sections)]
        if any(NO_BUBBLEWRAP in " ".join(text.split()) for text in texts):
            report.outcome = "skipped"
            report.longrepr = str(item.path), item.location[1] or 0, "Skipped: bubblewrap is not installed"
    return report


def pytest_terminal_summary(terminalreporter):
    """The last line names what was skipped, and why."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if reasons:
        terminalreporter.write_line(
            "skipped: " + "; ".join(f"{number} tests: {reason}" for reason, number in reasons.items())
        )
