"""Sessions of one rank in memory and in the journal: their states, rewards, endings and expiry."""
