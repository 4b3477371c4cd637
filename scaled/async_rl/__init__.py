"""The services of asynchronous RL (`ref/async_rl.py`), which share nothing but messages, a journal and a store.

| file | what |
|---|---|
| `messages.py` | what the services say to each other: frozen dataclasses, as JSON |
| `player.py` | groups of conversations played by one engine, with slow tools and weights in flight |
| `records.py` | a finished group as bytes |
| `services.py` | what a worker, the trainer and the reconciler do, each in a process of its own |
| `learner.py` | what one process trains |
| `local.py` | starts them on one machine, and starts anew whoever dies |
| `wire.py` | messages between processes of one machine |
| `reconciler.py` | who does what: leases, deadlines, epochs, and the journal that all of it is rebuilt from |
"""
