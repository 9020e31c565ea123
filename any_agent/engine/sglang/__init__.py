"""The client of SGLang servers."""
