"""Real data for pretraining, from sources to rows; `prepare.py` is the way from the first to the last.

| file | what it does |
|---|---|
| `sources.py` | folders, archives, JSONL and Parquet, divided into what one process reads at a time |
| `documents.py` | their documents; what cannot be read is named |
| `rules.py` | which documents are left out, and why; licence headers |
| `duplicates.py` | shingles, MinHash, exact and near duplicates |
| `holdout.py` | a held-out codebase, and what is too near to it |
| `scan.py` | one unit of a source on one process: read, judged, hashed; later tokenised |
| `shards.py` | tokens as memory-mapped files |
| `prepare.py` | the build, with processes, resumption and `data.json` |
| `read.py` | the finished folder: rows by weight, at any position |
"""
