# %% [markdown]
# # 16 · Textual feedback: the same policy, told where it went wrong
#
# **After this lesson you can** put a hint in front of a message and say which position predicts which token on both
# sides; choose a direction of the divergence by its gradient; and tell a hint from an answer that was given away.
#
# *About 45 minutes. Prerequisites: lessons 4 and 5. Source: the release of Composer 2.5, which gives no formula;
# arXiv:2601.20802.*
#
# ## The idea
#
# A rollout of a hundred messages gets one number. If message 37 called a tool that does not exist, all hundred share
# the blame, or the praise, since the rest may have been good. Somebody who reads the rollout could say what was wrong,
# and where, in half a line. Composer 2.5 was trained with such lines. Nothing is sampled again: the hint is put into
# the context in front of the message, and the message is scored twice.
#
# ```
# student    … answer |                            message | …    s = π(· | context, message so far)
# teacher    … answer | error: no such call        message        t = π(· | context, hint, message so far), no gradient
# ```
#
# The teacher is the policy itself. It knows more because it has read the hint, and the loss pulls the policy without
# the hint towards it:
#
# $$L = L_{\mathrm{Dr. GRPO}} + \frac{w}{\mathrm{budget}} \sum_{t \in \mathrm{message}} D(s_t, t_t)$$
#
# The budget is that of lesson 4: one number for the step. Three things remain open: where the tokens are, which $D$ to
# use, and what a hint may say.

# %% [markdown]
# **Predict first.** An agent chooses a tool in each of six turns, and one of the tools does not exist. Only the last
# turn decides the reward. It calls the missing tool once per rollout. How often does it do so after training on the
# reward alone? And after training with half a line of hint at each such call?

# %%
import random

import matplotlib.pyplot as plt
import torch

from lessons.course import check, quick, source, verdicts
from recipe.microrepo import Session, generate
from ref import textual_feedback
from ref.engine.sampler import Segment
from ref.textual_feedback import Hint

source(textual_feedback.predictions)

# %% [markdown]
# ## Where it went wrong
#
# In the small world a script can act as an agent that misspells a call. The environment says so afterwards. The hint
# says the same words beforehand.

# %%
task = generate(random.Random(3), "train", depth=1)
session, lines = Session(task), [("environment", task.prompt)]
for turn in (
    f"read {task.target}",
    f"raed {task.helpers[0]}",
    f"read {task.helpers[0]}",
    f"write {task.target}\n    {task.answer}",
    "test",
    "done",
):
    lines += [("agent", turn), ("environment", session.step(turn))]
for number, (role, text) in enumerate(lines):
    if number == 3:
        print("HINT         error: no such call")
    print(f"{role:13s}" + text.replace("\n", "\n             "))

# %% [markdown]
# With words for tokens, the bookkeeping is easy to see. `hinted` builds what the teacher reads. It ends with the
# message, since nothing after it is needed.

# %%
words = "repo m1 m3 <agent> read m3 <env> def m3: <agent> raed m1 <env> error <agent> read m1 <env>".split()
own = [False] * 4 + [True] * 3 + [False] * 3 + [True] * 3 + [False] * 2 + [True] * 3
ids = torch.arange(len(words))
segment = Segment(
    ids,
    torch.tensor(own),
    torch.zeros(len(ids)),
    torch.where(torch.tensor(own), 0, -1),
    torch.zeros(len(ids) - 1, 0, 1).short(),
    True,
)
begin, end = words.index("raed"), words.index("raed") + 3
hint = Hint(at=begin - 1, tokens=(100, 101, 102), begin=begin, end=end)
hinted_sequence = textual_feedback.hinted(segment, [hint])
spelt = dict(enumerate(words)) | {100: "NO", 101: "SUCH", 102: "CALL"}
print("student ", " ".join(words[:end]))
print("teacher ", " ".join(spelt[token] for token in hinted_sequence.tokens.tolist()))
print("positions of the message:", hinted_sequence.student.tolist(), "and", hinted_sequence.teacher.tolist())

# %% [markdown]
# The hint comes before the token that starts the agent's turn, as the last line of what the environment said. So the
# first token of the message is predicted by `<agent>` on both sides. Had the hint been put after it, the teacher's
# first prediction would come from `CALL`. This is the trap in the bookkeeping: step back by one *in each sequence*,
# instead of shifting the student's predicting position.
#
# ## Exercise 1: who predicts
#
# Write `predicting(begin, end, at, length)`: two lists, the positions whose logits predict the tokens `begin` to `end`
# of the segment, in the student's sequence and in the teacher's, which has a hint of `length` tokens in front of
# position `at ≤ begin`.


# %% tags=["exercise"]
def predicting(begin, end, at, length):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_1():
    for begin, end, at, length in (
        (10, 13, 9, 3),
        (10, 13, 10, 3),
        (4, 7, 0, 2),
        (15, 18, 14, 1),
        (15, 18, 15, 5),
        (10, 13, 9, 0),
    ):
        places = torch.arange(len(words) + length)
        hinted_sequence = textual_feedback.hinted(segment, [Hint(at, tuple(range(100, 100 + length)), begin, end)])
        want = [
            x[:, 0].tolist()
            for x in textual_feedback.predictions(
                places[: len(words), None].float(), places[:, None].float(), hinted_sequence
            )
        ]
        actual = predicting(begin, end, at, length)
        for name, positions, right in zip(("student", "teacher"), actual, want, strict=True):
            assert list(positions) == right, (
                f"message {begin} to {end}, {length} tokens in front of {at}: the {name}'s are "
                f"{right}, not {list(positions)}"
            )


check(1, check_1)


# %% tags=["solution"] jupyter={"source_hidden": true}
def predicting(begin, end, at, length):
    return [t - 1 for t in range(begin, end)], [t + length - 1 for t in range(begin, end)]


check(1, check_1)

# %% [markdown]
# ## Which divergence
#
# A hint makes the teacher do something else. Take three tokens: the fault, its correction, and the rest. The teacher
# has mostly given up the fault; the student makes the correction with probability $\epsilon$. The gradient with respect
# to the student's logits has a closed form:
#
# | | $D$ | gradient |
# |---|---|---|
# | forward | $\mathrm{KL}(t\,\|\,s)$ | $s - t$ |
# | reverse | $\mathrm{KL}(s\,\|\,t)$ | $s\,(\log(s/t) - \mathrm{KL}(s\,\|\,t))$ |
#
# The second has a factor $s$ in front. What the student never does gets no gradient, however likely the teacher finds
# it.

# %%
teacher = torch.tensor([0.05, 0.9, 0.05], dtype=torch.float64).log()
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
chances = torch.logspace(-6, -0.5, quick(60, 8), dtype=torch.float64)
for kind, style in (("forward", "-"), ("reverse", "--"), ("js", ":")):
    pushes = []
    for chance in chances:
        remainder = 0.1 * (1 - chance)
        student = torch.stack((1 - chance - remainder, chance, remainder)).log().requires_grad_()
        textual_feedback.divergence(student, teacher, kind).backward()
        pushes.append(-student.grad[1].item())
    axes.plot(chances, pushes, style, label=kind)
axes.set(xscale="log", yscale="log", xlabel="probability of the correction, student", ylabel="push on its logit")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Reverse is right where the student knows both ways and takes the wrong one too often: a misspelt call in one of ten
# messages. There it takes away what the teacher would not do, and asks for nothing that the student cannot do. Forward
# is needed where the student never takes the right way: a tool that was renamed after the student learnt about it.
#
# ## Exercise 2: both gradients
#
# Write `gradient(student, teacher, kind)`, the gradient of the divergence in the student's logits, [V], without
# autograd. Both arguments are logits, float64; `kind` is "forward" or "reverse".


# %% tags=["exercise"]
def gradient(student, teacher, kind):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_2():
    draw = torch.Generator().manual_seed(0)
    for kind in ("forward", "reverse"):
        for size in (2, 5, 9):
            student, teacher = 2 * torch.randn(2, size, generator=draw, dtype=torch.float64) + 3
            leaf = student.clone().requires_grad_()
            textual_feedback.divergence(leaf, teacher, kind).backward()
            actual = gradient(student, teacher, kind)
            max_error = (actual - leaf.grad).abs().max().item()
            assert max_error < 1e-9, f"{kind}, {size} tokens: the gradient is off by up to {max_error:.3g}"


check(2, check_2)


# %% tags=["solution"] jupyter={"source_hidden": true}
def gradient(student, teacher, kind):
    logs, logt = student.log_softmax(-1), teacher.log_softmax(-1)
    s, gap = logs.exp(), logs - logt
    return s - logt.exp() if kind == "forward" else s * (gap - (s * gap).sum())


check(2, check_2)

# %% [markdown]
# ## How it breaks: a hint that says too much
#
# The teacher reads the hint and then the message that the student wrote. If the hint contains the answer, distillation
# teaches the answers, task by task, and nothing that helps with the next one. If it quotes the message ("do not call
# raed m1"), a teacher that has just read these tokens finds them *likelier*, and the student learns its fault. `leaked`
# looks for both.

# %%
source(textual_feedback.leaked)

# %% [markdown]
# ## Exercise 3: a guard
#
# Write `fits(hint, secrets, context, n)`, True or False: whether a hint may be given. `secrets` is a list of texts,
# each a tuple of tokens. The hint must not share n tokens in a row with any of them, unless the context contains these
# n tokens in a row. Where the hint or a secret is shorter than n, it is looked for as a whole: n is then the shorter of
# the two lengths. An empty secret or an empty hint gives nothing away. Do not use `leaked`.


# %% tags=["exercise"]
def fits(hint, secrets, context, n):
    raise NotImplementedError  # your code


# %% tags=["check"]
def check_3():
    for case, arguments, should in (
        ("nothing in common", ((1, 2, 3), [(4, 5, 6)], (), 2), True),
        ("two in a row", ((1, 2, 3), [(9, 2, 3, 9)], (), 2), False),
        ("in the second secret", ((1, 2, 3), [(4, 5), (2, 3)], (), 2), False),
        ("the same tokens in another order", ((1, 2, 3), [(3, 2, 1)], (), 2), True),
        ("the context says so already", ((1, 2, 3), [(2, 3)], (7, 2, 3, 7), 2), True),
        ("the context has them apart", ((1, 2, 3), [(2, 3)], (2, 7, 3), 2), False),
        ("a short secret, as a whole", ((1, 2, 3), [(2,)], (), 4), False),
        ("a short hint, as a whole", ((2, 3), [(1, 2, 3, 4, 5)], (), 4), False),
        ("an empty hint", ((), [(1, 2)], (), 2), True),
        ("an empty secret", ((1, 2), [()], (), 2), True),
        ("no secrets", ((1, 2), [], (), 2), True),
    ):
        actual = fits(*arguments)
        assert actual is should, f"{case}: {should}, not {actual}"
    draw = random.Random(0)
    for _ in range(quick(1000, 200)):
        hint, first, second, context = (tuple(draw.choices(range(3), k=draw.randint(0, 6))) for _ in range(4))
        n = draw.randint(1, 4)
        should = all(textual_feedback.leaked(hint, secret, context, n) is None for secret in (first, second))
        actual = fits(hint, [first, second], context, n)
        assert actual is should, (
            f"hint {hint}, secrets {first} and {second}, context {context}, n = {n}: {should}, not {actual}"
        )


check(3, check_3)


# %% tags=["solution"] jupyter={"source_hidden": true}
def fits(hint, secrets, context, n):
    def runs(tokens, size):
        return {tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)}

    sizes = [min(n, len(hint), len(secret)) for secret in secrets]
    return not any(
        runs(hint, size) & runs(secret, size) - runs(context, size)
        for size, secret in zip(sizes, secrets, strict=True)
        if size
    )


check(3, check_3)

# %% [markdown]
# ## One reward against one hint
#
# The reference's `demo` has an agent that chooses a tool in each of six turns. One tool does not exist. Only the last
# turn decides the reward, so a call of the missing tool costs nothing, and RL sees it only as noise.

# %%
figures = textual_feedback.demo(textual_feedback.Demo(steps=quick(60, 5)))
for name in ("outcome", "feedback"):
    changes = {
        metric: f"{figures[f'{name}_{metric}_before']:.2f} → {figures[f'{name}_{metric}_after']:.2f}"
        for metric in ("faults", "success")
    }
    print(f"{name:9s} unavailable calls a rollout {changes['faults']}    success {changes['success']}")

# %% [markdown]
# **Your prediction:** the reward alone leaves 0.89 calls per rollout, and the hints leave 0.16. Success is the same.
#
# This policy understands the hint from the start, since it was built to. A large model understands English. The tiny
# agent of the small world understands neither. Before it was taught, it made the same fault again in 0.52 of the cases
# without a hint, in 0.36 with the right hint, and in 0.48 with the hint of another rollout. So
# `sims/textual_feedback/hinted.py` shows it demonstrations in which a hint stands in front of a turn that obeys, and
# `etude figure textual-feedback` then trains it, with controls that were written down before:

# %%
verdicts("textual-feedback")

# %% [markdown]
# Read the controls first. If hints that were exchanged between rollouts mend as much, the policy has learnt only to
# take care when there is a hint, and what the hint says does not matter much. In the world in which a call has another
# name, the two directions differ as the figure above says.
#
# ## Open challenge
#
# Weigh the positions at which a hinted teacher corrects the student, so that habits mend and answers that leaked teach
# nothing. `etude challenge 16` gives the rules, a file to begin with and the scores so far.
#
# ## Where to read on
#
# * `ref/textual_feedback.py` from the top; `ref/rl.py`, function `improve`, adds the loss to a step, and
#   `scaled/textual_feedback.py` says what must be sent when a message and its teacher are on different ranks.
# * `recipe/small/hints.py`: the rules that find the message and say what was wrong.
# * `etude explore`, page Textual feedback: an agent reads its own faults with and without hints, token by token.
# * `etude run recipe --scale small --set rl.feedback.weight=1` gives hints in the recipe.
# * SDPO (arXiv:2601.20802), SDFT (arXiv:2601.19897) and OPSD (arXiv:2601.18734).
