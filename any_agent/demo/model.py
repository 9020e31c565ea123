"""`python -m any_agent.demo.model`: make a tiny model."""

from any_agent.demo.models.tiny import main

if __name__ == "__main__":
    main()
