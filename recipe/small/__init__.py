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
| `latest_rollouts.py` | the newest rollouts as text, while RL trains |
| `monitoring.py`, `monitored.py` | the monitor beside RL; what is watched for |
| `evaluation.py` | what is measured before and after RL |
| `model_card.py`, `checks.py` | the model card of a checkpoint; limits of settings |
| `tasks.py`, `fp8_rounding.py` | tasks and their curriculum; weights as in an engine with 8-bit weights |
| `micro_world.py`, `transcripts.py`, `hints.py` | the small world as tasks of RL; episodes as records; hints by rule |
| `conversations.py`, `chat_template.py`, `export.py` | SFT on conversations in JSONL, and the recipe's as such |
"""
