"""The story of `sharpmax calibrate`: which heads of a model are sharpened, how much, and at what price."""
