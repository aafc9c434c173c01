"""The two horizons of every head: the one measured on prompts, and the one certified from weights alone."""
