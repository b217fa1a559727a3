"""The law: which token is decided. The only room whose code may change a text; it knows no policy and no session."""
