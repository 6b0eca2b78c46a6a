"""What one kernel computes, independent of any target, and what it is expected to cost."""
