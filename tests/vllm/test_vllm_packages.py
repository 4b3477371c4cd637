"""vLLM samples the rollouts of RL on tasks of packages, from the SFT checkpoint of a run (`make test-vllm`)."""

import json

import pytest
import torch

from kit.disk import read_lines
from ref.network import load_hf
from scaled.async_rl import services
from tests.mirror.conftest import here  # noqa: F401 – a fixture
from tests.mirror.test_packages import async_words, finished, recipes, start, words  # noqa: F401 – fixtures

pytestmark = pytest.mark.vllm


def test_rl_on_packages(start, recipes, finished, tmp_path, ask, here):  # noqa: F811
    """Each rollout is an episode in a sandbox, graded by the package's tests; log μ is the trainer's log π up to
    bfloat16's rounding, and after the last step another network is there."""
    assert ask(*words(finished, start, recipes, "rl.steps=1"))[0] == 0
    out, checkpoint = tmp_path / "async", finished / "checkpoints" / "sft"
    changes = {"staleness": 2, "slots": 8, "heldout": 0, "timeout": 120, "rl.steps": 3}
    code, _, error = ask(*async_words(out, checkpoint, "--engine", "vllm", **changes))
    assert code == 0, error
    assert json.loads((out / "report.json").read_text())["result"]["restarts"] == 0
    folder = out / "services"
    log = read_lines(folder / "events" / "worker-0.jsonl")
    assert not [line for line in log if line["what"] in ("died", "lost", "unsynced")]
    network, gaps, calls = load_hf(checkpoint).bfloat16(), [], 0
    for _, rollouts in services.trained(folder):
        assert len(rollouts) == 4 and not any(rollout.failure for rollout in rollouts)
        for rollout in rollouts:
            assert rollout.reward <= rollout.metrics["success"] and rollout.transcript  # less the price of effort
            calls += rollout.metrics["calls"]
            for segment in rollout.chain.segments:
                is_first = segment.sampled & (segment.version == 0)
                with torch.no_grad():
                    logp = network(segment.tokens[None, :-1]).logits[0].float().log_softmax(-1)
                own = logp.gather(1, segment.tokens[1:, None])[:, 0]
                gaps.append((own - segment.logp[1:])[is_first[1:]].abs())
    gap = torch.cat(gaps)
    assert calls > 0 and len(gap) > 50 and gap.mean() < 0.02
    final = load_hf(out / "checkpoints" / "final", torch.bfloat16)
    assert not all(a.equal(b) for a, b in zip(network.parameters(), final.parameters(), strict=True))
