"""Sessions by the dozen while their services are killed, stopped and cut off; and by the thousand."""
