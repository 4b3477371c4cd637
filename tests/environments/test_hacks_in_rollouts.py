"""Blind attacks as what a policy does in RL: rollouts of tokens, in sandboxes, graded, through a gradient step."""

import torch

from environments.grading.guarded import grade, prepare_exam
from environments.grading.lay import write
from environments.harness.environment import HarnessEnvironment, HarnessTask
from environments.harness.tools import openai, select_tools
from environments.harness.workspace import Job
from environments.sandbox.open import open_sandbox
from recipe.packages.chat_format import DEFAULT_TEMPLATE
from recipe.small.chat_template import Template
from ref import rl
from ref.chat_format import TemplateFormat
from ref.messages import Message, ToolCall
from ref.network import Config, Transformer
from ref.rollout import Limits, script_rollout
from tests.chats import CONTROL, bytes_tokenizer
from tests.environments import blind_hacks
from tests.environments.blind_hacks import ATTACKS
from tests.environments.test_apart import BARE
from tests.environments.test_hacks import fresh, nursed
from tests.talks import whole

__all__ = ["fresh", "nursed"]  # fixtures

TOOLS = ("write", "finish")
SUBMITTED = [*ATTACKS][:15]
LONGEST = 8000


def submit(files):
    """The turns of a policy that writes these files and says that it is done."""
    writes = tuple(
        ToolCall("write", {"path": path, "text": text}, f"c{at}") for at, (path, text) in enumerate(files.items())
    )
    yield Message("assistant", "I write it.", tool_calls=writes)
    yield Message("assistant", None, tool_calls=(ToolCall("finish", {"message": "Done."}, "f"),))


def test_no_attack_earns_a_reward_and_the_honest_rollout_does(fresh, nursed, root, shared_store, tmp_path):
    exam = prepare_exam(BARE, "words", fresh, judges=nursed)
    write(BARE.given_tree, tmp_path / "tree")
    job = Job("words", "Write plural.", shared_store.add_folder(tmp_path / "tree"), BARE.given_tree, tools=TOOLS)
    task = HarnessTask(job, exam)
    chat_format = TemplateFormat(
        bytes_tokenizer(control=CONTROL), Template(DEFAULT_TEMPLATE), openai(select_tools(TOOLS))
    )

    def play(files):
        environment = HarnessEnvironment(
            task,
            lambda tree: open_sandbox(tree, root=root, store=shared_store),
            shared_store,
            lambda task, tree, calls: grade(exam, shared_store.tree(tree), fresh, calls, 10, judges=nursed),
        )
        turns = submit(files)
        rollout = script_rollout(
            environment,
            chat_format,
            Limits(whole(LONGEST)),
            lambda messages, _: chat_format.encode_turn(messages, next(turns)),
        )
        rollout.task = task
        return rollout

    rollouts = [play(files) for files in (blind_hacks.GOLD, *(ATTACKS[name] for name in SUBMITTED))]
    assert all(rollout.metrics["finished"] for rollout in rollouts)
    assert [rollout.reward for rollout in rollouts] == [1.0] + [0.0] * 15
    assert sum(rollout.metrics["flags"] > 0 for rollout in rollouts[1:]) >= 8, "the monitor sees most of them, too"

    torch.manual_seed(0)
    shape = Config.tiny(
        chat_format.tokenizer.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=0,
        intermediate_size=16,
        max_position_embeddings=LONGEST,
    )
    settings = rl.Settings(prompts=1, rollouts=len(rollouts), budget_tokens=1000, micro_tokens=8192)
    result = rl.improve(settings, Transformer(shape), None, rollouts)
    assert result.rewards.tolist() == [1.0] + [0.0] * 15 and torch.isfinite(torch.tensor(result.loss))
