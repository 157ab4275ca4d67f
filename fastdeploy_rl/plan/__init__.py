"""Plans: from the trainer's layout to the engine's, as byte regions."""
