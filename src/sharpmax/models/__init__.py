"""Models that experiments run on: the paper's single head, with the weights that come with the package."""
