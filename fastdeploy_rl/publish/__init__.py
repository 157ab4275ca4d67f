"""The trainer's half: versions go out through here."""
