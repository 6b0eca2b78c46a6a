"""Some results of a function, or ranges of them, computed without the others.

An initialization function creates the whole state of a program; a mesh needs its own part.  `demands` finds
out which operands of every equation are needed for wanted ranges of results, `rules` how an operation is
computed for a range, and `random_bits` how random numbers are.
"""
