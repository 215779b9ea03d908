"""Prompts, rewards and the engines that draw responses."""
