"""Code of the notebooks that is too long for a cell, in a file with the notebook's name."""
