"""Solutions that must not pass: by the stem of a challenge, what is wrong, the file, and the word of the refusal; none
where the bar refuses."""

TWICE = """
def deletions(table):
    for function in range(table.shape[1]):
        failing = table[:, function]
        left = [other for other in range(table.shape[1]) if other != function and table[:, other].any()]
        if 3 <= failing.sum() <= 40 and table[~failing][:, left].any(0).all():
            return [[function], [function]]
"""
REMEMBERS = """
import numpy as np

known, prompts, kept = {}, [], {}

def seen_with(keys):
    groups = {known[key] for key in keys if key in known}
    first = min(groups, default=len(prompts))
    if not groups:
        prompts.append(set())
    for other in groups - {first}:
        prompts[first] |= prompts[other]
    prompts[first] |= set(keys)
    known.update(dict.fromkeys(prompts[first], first))
    return prompts[first]

def value(seen):
    return sum(np.exp(logp) * reward for reward, logp in seen) \
+ max(0.0, 1 - sum(np.exp(logp) for _, logp in seen)) * 0.5

def advantages(rewards, logps):
    keys = list(zip(rewards.tolist(), logps.tolist()))
    seen, found = seen_with(keys), []
    for i in range(4):
        others = tuple(sorted(keys[:i] + keys[i + 1 :]))
        kept.setdefault(others, value(seen))
        found.append(rewards[i] - kept[others])
    return found
"""
"""Learns the answers of a prompt from all its groups, and says the same about the same group."""
POOLS = """
import numpy as np

def estimate(logp, ref_logp):
    k3 = (np.expm1(ref_logp - logp) + logp - ref_logp).mean(1)
    return {}
"""
CHOOSES = """
import numpy as np

def estimate(logp, ref_logp):
    k1 = logp - ref_logp
    k3 = (k1 + np.expm1(-k1)).mean(1)
    usual = np.where(k3 < 0.03, 0.005, np.where(k3 < 0.4, 0.12, 1.0))
    near = np.where(k3 < 0.4, k3, k1.mean(1))
    return near + {} * (usual - near)
"""
WRONG = [
    (
        "00_recipe",
        "spends more than the budget",
        "def settings(rollouts):\n    return {'steps': 31, 'prompts': 16, 'rollouts': 8}\n",
        "settings may use 3840 rollouts",
    ),
    (
        "00_recipe",
        "changes the test",
        "def settings(rollouts):\n    return {'evaluation.tasks': 1}\n",
        "settings may set steps",
    ),
    (
        "01_cpt",
        "reads more than there is",
        "def plan(steps):\n    return [[0.01, 1.5]] * steps\n",
        "shares from 0 to 1",
    ),
    ("01_cpt", "plans too few steps", "def plan(steps):\n    return [[0.01, 0.5]] * 10\n", "shape [150, 2]"),
    (
        "01_cpt",
        "learns faster than any number",
        "def plan(steps):\n    return [[1e300, 0.5]] * steps\n",
        "learning rates from 0 to 1",
    ),
    ("01_cpt", "destroys the model", "def plan(steps):\n    return [[1.0, 0.5]] * steps\n", None),
    ("02_muon", "diverges", "def rounds(products):\n    return [[3.4445, -4.7750, 3.5]] * 5\n", "beyond 1000"),
    ("02_muon", "costs too much", "def rounds(products):\n    return [[1.5, -0.5]] * 8\n", "which cost 16"),
    (
        "03_mtp",
        "drafts more than it may",
        "def drafts(history, longest, cost):\n    return 9\n",
        "a whole number from 0 to 8; got 9",
    ),
    ("03_mtp", "always drafts all", "def drafts(history, longest, cost):\n    return longest\n", None),
    (
        "04_dr_grpo",
        "divides by the deviation",
        "def advantages(rewards, logps):\n    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)\n",
        "biased",
    ),
    (
        "04_dr_grpo",
        "peeks at other groups",
        "seen = []\n\ndef advantages(rewards, logps):\n    seen.append(rewards.mean())\n    return "
        "rewards - sum(seen) / len(seen)\n",
        "its own group alone",
    ),
    ("04_dr_grpo", "remembers the answers of other groups", REMEMBERS, "its own group alone"),
    (
        "04_dr_grpo",
        "leads downhill",
        "def advantages(rewards, logps):\n    return rewards.mean() - rewards\n",
        "downhill",
    ),
    (
        "05_kl",
        "k2, which is biased",
        "def estimate(logp, ref_logp):\n    return ((logp - ref_logp) ** 2 / 2).mean(1)\n",
        "biased",
    ),
    ("05_kl", "says the mean over all groups", POOLS.format("np.full(len(logp), k3.mean())"), "biased"),
    ("05_kl", "draws estimates halfway to their mean", POOLS.format("(k3 + k3.mean()) / 2"), "high here and low there"),
    (
        "05_kl",
        "says a number by heart",
        POOLS.format("0 * k3 + (0.005 if k3.mean() < 0.05 else 0.13 if k3.mean() < 0.4 else 1.0)"),
        "biased",
    ),
    (
        "05_kl",
        "draws estimates a little towards their mean",
        POOLS.format("0.95 * k3 + 0.05 * k3.mean()"),
        "its own group alone",
    ),
    ("05_kl", "chooses k3 close by and k1 far away", CHOOSES.format(0.0), None),
    (
        "05_kl",
        "chooses, and moves a tenth of the way to a number by heart",
        CHOOSES.format(0.1),
        "high here and low there",
    ),
    (
        "05_kl",
        "never negative",
        "def estimate(logp, ref_logp):\n    return (logp - ref_logp).mean(1).clip(0)\n",
        "biased",
    ),
    ("06_length_penalty", "teaches to give up", "def penalty(scales):\n    return 0.001, 0.0, 0.0\n", "give up"),
    (
        "06_length_penalty",
        "pays for effort",
        "def penalty(scales):\n    return -0.001, 0.0, 0.0\n",
        "from 0 to a million",
    ),
    (
        "06_length_penalty",
        "asks for all there is",
        "def penalty(scales):\n    return 1e308, 1e308, 1e308\n",
        "from 0 to a million",
    ),
    (
        "06_length_penalty",
        "asks for as much as it may",
        "def penalty(scales):\n    return 1e6, 0.0, 0.0\n",
        "too much success",
    ),
    (
        "06_length_penalty",
        "asks for more than a number",
        "def penalty(scales):\n    return 10**400, 0, 0\n",
        "penalty must return finite numbers",
    ),
    (
        "07_self_summary",
        "remembers instead of writing",
        "kept = {}\n\ndef summarise(summary, lines, longest):\n    for line in lines:\n        verb, "
        "name, *rest = line.split()\n"
        "        if rest:\n            kept[name] = int(rest[0]) + (kept.get(name, 0) if verb == 'add' "
        "else 0)\n    return ''\n\n"
        "def answer(summary, name):\n    return str(kept.get(name, 0))\n",
        None,
    ),
    (
        "07_self_summary",
        "answers with a number",
        "def summarise(summary, lines, longest):\n    return ''\n\ndef answer(summary, name):\n    return 12\n",
        "answer must return text; got 12",
    ),
    (
        "07_self_summary",
        "answers with an array",
        "import numpy\n\ndef summarise(summary, lines, longest):\n    return ''\n\ndef answer(summary, "
        "name):\n    return numpy.array([1, 2])\n",
        "answer must return text; got an array",
    ),
    (
        "07_self_summary",
        "writes all",
        "def summarise(summary, lines, longest):\n    return ' '.join(lines)\n",
        "may return 120 characters",
    ),
    (
        "07_self_summary",
        "packs bits into letters",
        "def summarise(summary, lines, longest):\n    return chr(50000)\n",
        "printable ASCII",
    ),
    ("08_router_replay", "trusts all", "def slipped(scores, experts):\n    return [0] * len(scores)\n", None),
    ("08_router_replay", "suspects all", "def slipped(scores, experts):\n    return [1] * len(scores)\n", None),
    (
        "09_packing",
        "deals in turn",
        "def deal(costs, ranks):\n    return [i % ranks for i in range(len(costs))]\n",
        None,
    ),
    ("09_packing", "keeps some for itself", "def deal(costs, ranks):\n    return [0] * 3\n", "shape [160]"),
    (
        "10_quant",
        "uses too many bits",
        "def encode(x):\n    return x.astype('float16').tobytes()\n\ndef decode(code, rows, width):\n    ...\n",
        "4.5 bits",
    ),
    (
        "10_quant",
        "remembers instead of coding",
        "kept = []\n\ndef encode(x):\n    kept.append(x)\n    return b'x'\n\ndef decode(code, rows, "
        "width):\n    return kept[0]\n",
        "IndexError",
    ),
    (
        "10_quant",
        "sends nothing",
        "def encode(x):\n    return b''\n\ndef decode(code, rows, width):\n    return [[1e9] * width] * rows\n",
        "must return some bytes",
    ),
    (
        "10_quant",
        "knows the numbers from elsewhere",
        "import numpy as np\nfrom lessons.challenges import quant\n\ndef encode(x):\n    return b'x'\n\n"
        "def decode(code, rows, width):\n    return quant.draw_activations(np.random.default_rng(1)) + "
        "np.float32(1e-3)\n",
        "more than 45 dB",
    ),
    (
        "10_quant",
        "is infinitely far off",
        "import numpy as np\n\ndef encode(x):\n    return b'x'\n\ndef decode(code, rows, width):\n    "
        "return np.full((rows, width), 1e300)\n",
        "noise is infinite",
    ),
    (
        "11_mirror",
        "guesses from its own quarter",
        "import numpy as np\n\ndef talk(rank, ranks, logits, targets, heard):\n"
        "    return float((np.logaddexp.reduce(logits, 1) + np.log(4)).mean() - logits.max(1).mean())\n",
        "a rank says that the loss is",
    ),
    (
        "11_mirror",
        "never says a loss",
        "def talk(rank, ranks, logits, targets, heard):\n    return {}\n",
        "within 4 rounds",
    ),
    (
        "11_mirror",
        "writes to itself",
        "def talk(rank, ranks, logits, targets, heard):\n    return {str(rank): b'x'}\n",
        "the number of another rank",
    ),
    (
        "12_weight_sync",
        "loses the smallest changes",
        "def encode(old, new):\n    return b''\n\ndef decode(old, delta):\n    return old\n",
        "bit for bit",
    ),
    (
        "13_async_rl",
        "starts more than there is room for",
        "def start(state):\n    return state['free'] + 1\n",
        "a whole number from 0 to 128; got 129",
    ),
    ("13_async_rl", "never starts", "def start(state):\n    return 0\n", None),
    (
        "14_feature_deletion",
        "takes out too much",
        "def deletions(table):\n    return [list(range(7))]\n",
        "no set of one to 6 functions",
    ),
    ("14_feature_deletion", "counts a task twice", TWICE, "must not share a function"),
    (
        "14_feature_deletion",
        "leaves the answer behind",
        "def deletions(table):\n    return [[i] for i in range(60)]\n",
        "makes no task",
    ),
    ("15_environments", "accuses all", "def cheats(turns):\n    return 1\n", None),
    (
        "16_textual_feedback",
        "learns nothing",
        "def weights(student, teacher):\n    return [0.0] * len(student)\n",
        None,
    ),
    (
        "16_textual_feedback",
        "believes leaks as firmly as habits",
        "def weights(student, teacher):\n    return [10.0] * len(student)\n",
        None,
    ),
    (
        "16_textual_feedback",
        "pushes away",
        "def weights(student, teacher):\n    return [-1.0] * len(student)\n",
        "between 0 and 10",
    ),
    ("17_behaviour", "teaches to do nothing", "def prices(ways, success, habits):\n    return [0.2, 0.2, 0.2]\n", None),
    (
        "17_behaviour",
        "names the best prices for all worlds",
        "def prices(ways, success, habits):\n    return [0.0, 0.05, 0.03]\n",
        None,
    ),
    (
        "17_behaviour",
        "names prices that no number holds",
        "def prices(ways, success, habits):\n    return [1e308] * 3\n",
        "not be above 1; got",
    ),
    (
        "17_behaviour",
        "pays for a habit",
        "def prices(ways, success, habits):\n    return [-0.1, 0.0, 0.0]\n",
        "must not be negative",
    ),
    (
        "18_monitor",
        "looks thirty times as if it looked once",
        "import numpy as np\n\ndef alarms(counts, rates, rollouts):\n    n = rollouts * counts.shape[1]\n"
        "    return (counts.sum(1) > n * rates + 2.33 * np.sqrt(n * rates * (1 - rates))).astype(int)\n",
        "false too often",
    ),
    ("18_monitor", "never alarms", "def alarms(counts, rates, rollouts):\n    return [0] * len(counts)\n", None),
]
