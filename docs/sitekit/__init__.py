"""What the documentation's pages are given when the site is built."""
