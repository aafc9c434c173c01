"""The story of `sharpmax evaluate`: a language model as it comes, and under policies."""
