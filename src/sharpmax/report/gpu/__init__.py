"""What `sharpmax bench --gpu` found, told from its saved file alone."""
