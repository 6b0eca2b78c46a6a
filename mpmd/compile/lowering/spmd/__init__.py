"""Programs of several devices: from whole shapes and shardings to the program of each device.

`shardy.py` has Shardy choose shardings and insert communication; `localise.py` takes the program to the
shapes of one device; `spmd_rules.py` and `local_parts.py` add what operations need beyond that, with the
moves of values between devices in `moves.py`.
"""
