"""A language model with and without policies, on the same prompts, text and machine."""
