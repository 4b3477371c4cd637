"""The floor that every other room stands on: run folders, settings, processes, progress.

| file | what |
|---|---|
| `runs.py` | the folder of a run: resumable stages, states, metrics, the lock |
| `settings.py` | frozen dataclasses filled from TOML and from `--set key=value` |
| `process.py` | one-thread processes on all cores, the machine's facts, random generators |
| `progress.py` | the live line of a stage |
| `disk.py` | files that outlive a kill and a full disk |
| `board.py` | TensorBoard's events |

This room imports no other.
"""
