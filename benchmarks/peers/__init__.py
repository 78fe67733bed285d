"""Peers of our arms: other packages, each in a process of its own."""
