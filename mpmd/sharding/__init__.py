"""How values lie on the devices of one mesh: what a sharding means, in shapes and bytes."""
