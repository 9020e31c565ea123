"""Sessions of one rank: their states, rewards, endings and time; in memory and in the journal."""
