"""One program in several processes: what they agree on, who is alive, and what failed.

scalars → agreement → part, while `monitor` watches the others; `world` is the key-value store beneath it.
"""
