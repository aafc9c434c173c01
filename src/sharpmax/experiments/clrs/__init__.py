"""CLRS-Text: fine-tune a language model on algorithms as text, and evaluate it at larger sizes."""
