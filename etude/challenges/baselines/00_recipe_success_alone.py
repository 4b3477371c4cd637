"""Nothing but success is paid, and nothing but drift is priced; larger groups, a higher learning rate."""


def settings(rollouts):
    return {"steps": rollouts // 128, "prompts": 8, "rollouts": 16, "lr": 2e-4, "decay": 15, "payment.effort_price": 0.0, "payment.kl": 0.001}
