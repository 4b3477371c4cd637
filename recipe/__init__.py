"""The whole recipe: small on this machine, full on many ranks, and asynchronous."""
