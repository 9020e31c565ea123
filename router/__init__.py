"""The single public URL: finds each request's rank and passes it on, byte by byte."""
