"""The GPU worker: one per GPU slot, always warm, one instance at a time."""
