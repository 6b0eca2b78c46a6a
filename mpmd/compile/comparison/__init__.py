"""Results of one fragment by two compilers: what differs beyond rounding, and where it begins.

| file | what it holds |
|---|---|
| `rounding.py` | the difference of two arrays, and whether rounding explains it |
| `narrowing.py` | the first operation that differs, and the pass that makes it; a third opinion in f64 |
"""
