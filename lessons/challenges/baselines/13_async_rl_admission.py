"""As `ref/async_rl.py` admits: no more on their way than the trainer takes before they are too old."""


def start(state):
    in_flight = len(state["running"]) + len(state["finished"])
    return max(0, min(state["free"], (state["bound"] + 1) * state["batch"] - in_flight))
