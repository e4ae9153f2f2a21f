"""A table -> its rows, with the values exactly as the files have them."""
