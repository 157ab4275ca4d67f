"""One update as a transaction: named steps with undo, the rank's side of them, and the coordinator of all ranks."""
