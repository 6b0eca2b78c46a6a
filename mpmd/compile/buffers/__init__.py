"""Buffer assignment: live ranges, coalescing, packing, and a slice of an allocation for each value.

| file | what it holds |
|---|---|
| `sharing.py` | values that share memory: results with donated parameters, temporaries with outputs |
| `offsets.py` | blocks of bytes and time into one arena |
| `assignment.py` | the result: a slice of an allocation for each value |
| `fitting.py` | values computed again until temporaries fit into the memory of a device |
| `buffer_report.py` | the assignment as text, and the values live at the peak; the arena as a picture |
"""
