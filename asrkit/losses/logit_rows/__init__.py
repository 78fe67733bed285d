"""The two passes over the logits: arc log-probabilities in forward, the gradient in backward.

A file for each implementation, with two functions (asrkit.losses.gradient.LogitRows):

    arc_log_probs   logits -> log-normaliser and log-probabilities of the arcs of every node
    gradient        arc posteriors -> gradient of the loss over the logits

All bytes that matter are moved here: the logits are read twice, the gradient is written once.
"""
