"""The complete recipe, at small scale.

| file | what |
|---|---|
| `stages.py` | data → pretraining → MTP → long context → SFT → RL → evaluation: read this first |
| `settings.py` | every setting |
| `data.py` | corpus, tokenizer, rows |
| `agent.py` | the policy over tokens in an environment of texts |
| `demonstrations.py` | the data of SFT: a scripted agent and its summaries |
| `learner.py` | the supervised phases, checkpoints |
| `reinforcement.py` | the loop of RL around `ref/rl.py` |
| `latest.py` | the newest rollouts as text, while RL trains |
| `watching.py`, `watched.py` | the monitor beside RL; what is watched for |
| `evaluation.py` | what is measured before and after RL |
| `model_card.py`, `limits.py` | the model card of a checkpoint; limits of settings |
"""
