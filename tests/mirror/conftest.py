"""What tests of the full recipe share."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def here(monkeypatch):
    """Ranks that are there already, instead of torchrun's; here.append(STAGE) makes the next ones die in it."""
    from scaled.runtime import launch
    from tests.mirror import calls
    from tests.mirror.workers import ranks

    kills: list[str] = []

    def start(module: str, arguments: list[str], nproc: int, restarts: int, node=None) -> int:
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
