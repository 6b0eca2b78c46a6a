"""The parts of a checkpoint: `pieces` of leaves, `files` of orbax, `folder` of all checkpoints of a run."""
