"""Layout of values on the devices of one mesh: the meaning of a sharding in shapes and bytes."""
