"""Whose a session is. The only room that claims one."""
