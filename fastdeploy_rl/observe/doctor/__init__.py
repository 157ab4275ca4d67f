"""Examines a machine before, between and after runs: what may go wrong here, what went wrong, and the mend for each."""
