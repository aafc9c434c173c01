"""The story of `sharpmax compare`: softmax and its alternatives on inputs larger than those in training."""
