"""CLRS-Text: a language model fine-tuned on classical algorithms with and without sharp attention, and examined."""
