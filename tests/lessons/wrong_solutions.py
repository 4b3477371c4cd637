"""Solutions that must not pass: by the stem of a challenge, what is wrong, the file, and the word of the refusal; none where the bar refuses."""

WRONG = [
    (
        "00_recipe",
        "spends more than the budget",
        "def settings(rollouts):\n    return {'steps': 31, 'prompts': 16, 'rollouts': 8}\n",
        "settings may use 3840 rollouts",
    ),
    ("00_recipe", "changes the test", "def settings(rollouts):\n    return {'evaluation.tasks': 1}\n", "settings may set steps"),
    ("02_muon", "diverges", "def rounds(products):\n    return [[3.4445, -4.7750, 3.5]] * 5\n", "beyond 1000"),
    ("02_muon", "costs too much", "def rounds(products):\n    return [[1.5, -0.5]] * 8\n", "which cost 16"),
    ("03_mtp", "drafts more than it may", "def drafts(history, longest, cost):\n    return 9\n", "a whole number from 0 to 8; got 9"),
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
        "seen = []\n\ndef advantages(rewards, logps):\n    seen.append(rewards.mean())\n    return rewards - sum(seen) / len(seen)\n",
        "its own group alone",
    ),
    ("04_dr_grpo", "leads downhill", "def advantages(rewards, logps):\n    return rewards.mean() - rewards\n", "downhill"),
    ("05_kl", "k2, which is biased", "def estimate(logp, ref_logp):\n    return ((logp - ref_logp) ** 2 / 2).mean(1)\n", "biased"),
    ("05_kl", "never negative", "def estimate(logp, ref_logp):\n    return (logp - ref_logp).mean(1).clip(0)\n", "biased"),
    ("06_length_penalty", "teaches to give up", "def penalty(scales):\n    return 0.001, 0.0, 0.0\n", "give up"),
    ("06_length_penalty", "pays for effort", "def penalty(scales):\n    return -0.001, 0.0, 0.0\n", "not negative"),
    ("09_packing", "deals in turn", "def deal(costs, ranks):\n    return [i % ranks for i in range(len(costs))]\n", None),
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
        "kept = []\n\ndef encode(x):\n    kept.append(x)\n    return b''\n\ndef decode(code, rows, width):\n    return kept[0]\n",
        "IndexError",
    ),
    (
        "12_weight_sync",
        "loses the smallest changes",
        "def encode(old, new):\n    return b''\n\ndef decode(old, delta):\n    return old\n",
        "bit for bit",
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
