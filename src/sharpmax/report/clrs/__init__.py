"""The story of `sharpmax clrs evaluate`: algorithms as text, at sizes trained on and beyond."""
