"""What every other package builds on: run folders, settings, processes, progress.

| file | what |
|---|---|
| `runs.py` | the folder of a run: resumable stages, checkpoints, metrics, the lock |
| `settings.py` | frozen dataclasses filled from TOML and from `--set key=value` |
| `process.py` | one-thread processes on all cores, facts about the machine, random generators |
| `progress.py` | the live line of a stage |
| `disk.py` | files that survive a kill and a full disk |
| `statistics.py`, `trends.py` | estimates with their uncertainty; lines through training runs |
| `plots.py` | the look of pictures |
| `board.py` | TensorBoard events |
| `tracking.py` | the same metrics for trackio or Weights & Biases, where asked for |

This package imports no other package of the project.
"""
