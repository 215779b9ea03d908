"""The policy's weights on their way to a rollout engine: whole, versioned, or an error."""
