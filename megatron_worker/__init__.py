"""The policy on Megatron-core: the only package that imports `megatron.core`."""
