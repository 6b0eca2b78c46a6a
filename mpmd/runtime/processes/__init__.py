"""One program in several processes: what they agree on, who is alive, and what failed.

`placing` divides devices and cores, `exchange` compares what must be equal, and `part` runs the streams of
this process, while `monitor` watches the others.  `store` and `world` are the key-value store beneath them.
"""
