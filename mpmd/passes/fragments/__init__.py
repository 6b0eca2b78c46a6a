"""Shared code of passes about fragments; it builds on `mpmd.ir` alone."""
