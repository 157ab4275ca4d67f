"""The engine's half: how the bytes of a published version get here, one file per load strategy."""
