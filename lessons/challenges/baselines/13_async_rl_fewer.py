"""About a batch and a half on their way, less what has become so old that it will hardly arrive."""


def start(state):
    arriving = sum(1.0 if age == 0 else 0.7 if age == 1 else 0.3 for age, _ in state["running"])
    target = 1.7 * state["batch"] - len(state["finished"]) - arriving
    return max(0, min(state["free"], round(target)))
