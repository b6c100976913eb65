"""A model checker of live migration: the real cores in a small cluster, every interleaving, every single fault."""
