"""Learn a policy for a model within a budget."""
