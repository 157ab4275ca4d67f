"""Engines whose weights are kept live: each offers a `ModelRunner`
and may know its own framework; nothing to their left does."""
