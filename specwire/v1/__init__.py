"""Messages and services of package specwire.v1, generated from proto/ by `make proto`."""
