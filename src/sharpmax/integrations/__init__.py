"""Where models run: policies in transformers models."""
