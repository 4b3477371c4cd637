"""KL estimators on many ranks: `ref/kl.py` unchanged.

Every function there is a function of one token (or of one row of logits), so this rank's tokens are all it needs. The
sum over ranks happens in the loss or reward that uses the values: `scaled/dr_grpo.py`. If the logits of a row do not
fit in memory, `Transformer.logprob` and `kernels/linear_logprob.py` compute log-probs, and the KL of two heads, without
them.
"""

from ref.kl import KINDS, crossing, exact_kl, gaussian_oracle, token_kl

__all__ = ["KINDS", "token_kl", "exact_kl", "gaussian_oracle", "crossing"]
