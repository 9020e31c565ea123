"""The OpenAPI description of every route."""
