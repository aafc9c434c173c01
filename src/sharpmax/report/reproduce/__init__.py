"""The story of `sharpmax reproduce`: a single attention head that has to find the best of ever more items."""
