"""The story of `sharpmax probe`: which heads of a model lose focus as inputs grow, when, and how predictably."""
