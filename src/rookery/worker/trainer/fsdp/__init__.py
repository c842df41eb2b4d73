"""A trainer whose policy is sharded over a group of processes (FSDP2): full parameters, or LoRA over a sharded base."""
