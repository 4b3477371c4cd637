"""Thirty steps with the recipe's own settings."""


def settings(rollouts):
    return {"steps": rollouts // 128, "decay": 10}
