"""Who is there: services say so in Redis, and orchestrators read it."""
