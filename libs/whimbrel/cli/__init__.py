"""The `whimbrel` command: a whole cluster on this machine, and everything an operator asks of one."""
