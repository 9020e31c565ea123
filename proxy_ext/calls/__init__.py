"""Model calls under way: their places, their retries, and whether their answers arrived."""
