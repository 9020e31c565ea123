"""The HTTP routes of a rank: model calls, `/rl`, models, and their OpenAPI description."""
