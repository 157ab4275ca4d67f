"""The smallest engine that has everything an update touches: for tests, and for reading how a runner fits."""
