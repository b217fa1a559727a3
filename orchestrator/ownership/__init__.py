"""Whose a session is: the room that claims, follows and sweeps."""
