"""Maths, data and loop of a Megatron RL training backend. Importing it does nothing; import from the defining
module.
"""
