"""Model calls under way: their slots, their retries, and the delivery of their answers."""
