"""How bytes are reachable: shared segments, locks that show who is alive, views of tensors. No policy."""
