"""The same techniques on many ranks: the file names, public names and signatures of `ref`, written to scale.

`scaled.X.f` takes this rank's shard of the arguments of `ref.X.f` and equals it where there is one rank.
"""
