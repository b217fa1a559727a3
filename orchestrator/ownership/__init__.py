"""Who owns a session: the room that claims, follows and sweeps."""
