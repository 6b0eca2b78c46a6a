"""Programs of several devices: from whole shapes and shardings to the program of each device.

`shardy.py` has Shardy choose shardings and insert communication; `localise.py` takes the program to the
shapes of one device; `rules.py` and its siblings add what operations need beyond that.
"""
