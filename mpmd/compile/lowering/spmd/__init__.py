"""Programs of several devices: from whole shapes and shardings to what each device does.

`shardy.py` has Shardy decide how every value is cut and where devices communicate; `localise.py` takes the
program to the shapes of one device; `rules.py` and its siblings say what operations need beyond that.
"""
