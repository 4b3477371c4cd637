"""A door out of a sandbox that has no network: which requests may leave it, who answers them, and what is written
down."""
