"""The scheduler: cluster state, estimates, placement, load queues, scaling."""
