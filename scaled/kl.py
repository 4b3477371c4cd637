"""KL estimators on many ranks: `ref/kl.py` as it stands.

Every function there is a function of one token (or of one row of logits), so this rank's tokens are all it needs. What is summed over
ranks is the loss or the reward that the values go into: `scaled/dr_grpo.py`. Where the logits of a row would be too many to hold,
`Transformer.logprob` and `kernels/linear_logprob.py` give log-probs, and the KL of two heads, without them.
"""

from ref.kl import KINDS, crossing, exact_kl, gaussian_oracle, token_kl

__all__ = ["KINDS", "token_kl", "exact_kl", "gaussian_oracle", "crossing"]
