"""The shared-memory record through which trainers, the engine's ranks and its clients agree."""
