"""Setting a folder up in two stages: commands and checks are proposed, then tried in a sandbox until the checks
pass."""
