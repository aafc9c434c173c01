"""Where models run: policies in transformers models and in GGUF files."""
