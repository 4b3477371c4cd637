"""Answers to the exercises of lesson 16, by lesson and exercise; `answers.py` says how they are written and read."""

TEXTS: dict[str, dict[int, str]] = {}

TEXTS["16_textual_feedback"] = {
    1: """
# wrong: the tokens themselves
def predicting(begin, end, at, length):
    return list(range(begin, end)), list(range(begin + length, end + length))

# wrong: the student's predicting positions, shifted where they stand behind the hint
def predicting(begin, end, at, length):
    mine = list(range(begin - 1, end - 1))
    return mine, [t + length * (t >= at) for t in mine]

# wrong: no shift
def predicting(begin, end, at, length):
    return list(range(begin - 1, end - 1)), list(range(begin - 1, end - 1))

# right: ranges
def predicting(begin, end, at, length):
    return range(begin - 1, end - 1), range(begin + length - 1, end + length - 1)
""",
    2: """
# wrong: the directions exchanged
def gradient(student, teacher, kind):
    logs, logt = student.log_softmax(-1), teacher.log_softmax(-1)
    s, gap = logs.exp(), logs - logt
    return s - logt.exp() if kind == "reverse" else s * (gap - (s * gap).sum())

# wrong: the other sign
def gradient(student, teacher, kind):
    logs, logt = student.log_softmax(-1), teacher.log_softmax(-1)
    s, gap = logs.exp(), logs - logt
    return logt.exp() - s if kind == "forward" else s * ((s * gap).sum() - gap)

# wrong: reverse without the divergence
def gradient(student, teacher, kind):
    logs, logt = student.log_softmax(-1), teacher.log_softmax(-1)
    return logs.exp() - logt.exp() if kind == "forward" else logs.exp() * (logs - logt)

# wrong: logits for log-probs
def gradient(student, teacher, kind):
    s, gap = student.softmax(-1), student - 2 * teacher
    return s - teacher.softmax(-1) if kind == "forward" else s * (gap - (s * gap).sum())

# right: through the softmax's Jacobian
def gradient(student, teacher, kind):
    s, t = student.softmax(-1), teacher.softmax(-1)
    inner = -t / s if kind == "forward" else (s / t).log() + 1
    return (torch.diag(s) - s[:, None] * s[None]) @ inner
""",
    3: """
# wrong: the context does not excuse
def fits(hint, secrets, context, n):
    def runs(tokens, size):
        return {tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)}

    sizes = [min(n, len(hint), len(secret)) for secret in secrets]
    return not any(runs(hint, size) & runs(secret, size) for size, secret in zip(sizes, secrets, strict=True) if size)

# wrong: short ones are let through
def fits(hint, secrets, context, n):
    def runs(tokens):
        return {tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)}

    return not any(runs(hint) & runs(secret) - runs(context) for secret in secrets)

# wrong: sets of tokens
def fits(hint, secrets, context, n):
    return not any(len(set(hint) & set(secret) - set(context)) \
>= max(1, min(n, len(hint), len(secret))) for secret in secrets)

# wrong: the first secret alone
def fits(hint, secrets, context, n):
    return not secrets or textual_feedback.leaked(hint, secrets[0], context, n) is None

# right: window by window
def fits(hint, secrets, context, n):
    def holds(text, run):
        return any(tuple(text[at : at + len(run)]) == run for at in range(len(text) - len(run) + 1))

    for secret in secrets:
        size = min(n, len(hint), len(secret))
        for at in range(len(hint) - size + 1 if size else 0):
            run = tuple(hint[at : at + size])
            if holds(secret, run) and not holds(context, run):
                return False
    return True
""",
}
