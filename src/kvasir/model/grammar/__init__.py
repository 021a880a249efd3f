"""Grammars that a text must follow: from regular expressions and from JSON schemas."""
