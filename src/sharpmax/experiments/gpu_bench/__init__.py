"""What sharp attention costs on a GPU, next to the stock kernels of the same run: from shapes to a file of entries."""
