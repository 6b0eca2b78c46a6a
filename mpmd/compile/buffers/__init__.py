"""Which bytes hold which value: live ranges, sharing, packing, the assignment and its report.

| file | what it holds |
|---|---|
| `donation.py` | which result takes the memory of which donated parameter |
| `ranges.py` | when each value's memory is in use, holes included |
| `sharing.py` | values that take each other's memory where that harms nobody |
| `borrowing.py` | temporaries in the memory of results, before those are written |
| `packing.py` | blocks of bytes and time into one arena |
| `assignment.py` | the result: a slice of an allocation for each value |
| `report.py` | the assignment as text, and who holds the peak |
| `plot.py` | the arena as a picture |
"""
