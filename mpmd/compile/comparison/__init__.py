"""Results of one fragment by two compilers: what differs beyond rounding, and where it begins.

| file | what it holds |
|---|---|
| `rounding.py` | the difference of two arrays, and whether rounding explains it |
| `widened.py` | a fragment in f64: the third opinion |
| `narrowing.py` | the first operation that differs, and the pass without which it does not |
"""
