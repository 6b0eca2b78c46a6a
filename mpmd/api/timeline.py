"""Timelines of a step: predicted from costs, measured as it runs."""
