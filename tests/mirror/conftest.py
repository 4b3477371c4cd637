"""What tests of the full recipe share."""

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def rested():
    """Ranks end with the file. One that has none does not import them: that takes longer than many a test."""
    yield
    if workers := sys.modules.get("tests.mirror.workers"):
        for n in (2, 4):
            workers.ranks(n).stop()


@pytest.fixture
def here(monkeypatch):
    """Ranks that are there already, instead of torchrun's; here.append(STAGE) makes the next ones die in it."""
    from scaled.runtime import launch
    from tests.mirror import calls
    from tests.mirror.workers import ranks

    kills: list[str] = []

    def start(module: str, arguments: list[str], nproc: int, restarts: int) -> int:
        try:
            ranks(nproc).run(
                dict(dp=nproc, cp=1, ep=1), calls.whole, Path(arguments[0]), json.loads(arguments[1]), *kills[:1]
            )
        except RuntimeError as error:
            if not kills:
                raise
            assert "the process ended" in str(error) and kills.pop(0)
            (Path(arguments[0]) / "dead").unlink()
            return 1
        return 0

    monkeypatch.setattr(launch, "start", start)
    return kills
