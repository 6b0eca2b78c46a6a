"""Facts about HLO programs: values, aliasing, live ranges, reachability, cost."""
