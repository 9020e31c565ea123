"""One public URL for many accounts, each with runs of its own: ``python -m router.cloud``."""
