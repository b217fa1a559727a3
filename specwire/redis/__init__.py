"""How processes reach Redis: URLs, one server, Sentinels, clusters."""
