"""Half again the learning rate, no harder tasks in the later steps, and nothing but success is paid."""


def settings(rollouts):
    return {"steps": rollouts // 128, "lr": 1.5e-4, "warmup": 2, "decay": 10, "later": 0.0, "payment.effort_price": 0.0}
