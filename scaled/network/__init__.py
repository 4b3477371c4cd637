"""The network on many ranks: `ref/network/` under FSDP2, expert parallelism and context parallelism."""
