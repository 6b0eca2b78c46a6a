LEFT: dict[str, tuple[str, str]] = {}
