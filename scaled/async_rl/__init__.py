"""The services of asynchronous RL (`ref/async_rl.py`), which share nothing but messages, a journal and a store.

| file | what |
|---|---|
| `messages.py` | what the services say to each other: frozen dataclasses, as JSON |
| `player.py` | groups of rollouts sampled by one engine, with slow tools and weights in flight |
| `records.py` | a finished group as bytes |
| `services.py` | what the reconciler and the trainer do, each in a process of its own |
| `worker.py` | the same of a worker: it samples groups, stores them, and loads weights in the background |
| `vllm_engine.py`, `vllm_weights.py` | vLLM instead of this project's engine: its slots, its weights in its process |
| `evaluator.py` | the same of the evaluator, which follows versions and measures them |
| `learner.py` | what one process trains |
| `local.py` | starts them on one machine, and starts anew whoever dies |
| `cluster.py` | the same on a Ray cluster |
| `wire.py` | messages between processes, of one machine or of several |
| `reconciler.py` | who does what: leases, deadlines, epochs, and the journal that all of it is rebuilt from |
"""
