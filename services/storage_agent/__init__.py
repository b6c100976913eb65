"""The storage agent: one server's checkpoint tiers and its one load queue."""
