"""The whole MPMD pipeline as lists: each entry a pass and the reason why it stands there."""
