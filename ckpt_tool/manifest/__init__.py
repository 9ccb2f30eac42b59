"""The neutral model between all formats: which box of which tensor lives at which bytes of which file."""
