"""The `rlcore` command: thin, and the only place that wires megatron_worker to the loop."""
