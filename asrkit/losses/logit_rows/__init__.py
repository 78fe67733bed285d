"""From logits to the scores of lattice nodes, and from shares of the likelihood to the gradient
over the logits.
"""
