"""Buffer assignment: live ranges, coalescing, packing, and a slice of an allocation for each value.

| file | what it holds |
|---|---|
| `sharing.py` | which result takes the memory of which donated parameter |
| `ranges.py` | when each value's memory is in use, holes included |
| `sharing.py` | values that share memory where their live ranges allow it |
| `sharing.py` | temporaries in output buffers, before these are written |
| `packing.py` | blocks of bytes and time into one arena |
| `assignment.py` | the result: a slice of an allocation for each value |
| `fitting.py` | values computed again until temporaries fit into the memory of a device |
| `report.py` | the assignment as text, and the values live at the peak |
| `plot.py` | the arena as a picture |
"""
