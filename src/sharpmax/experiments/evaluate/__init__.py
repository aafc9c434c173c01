"""A language model as it comes and under policies: the same prompts, the same text, the same machine."""
