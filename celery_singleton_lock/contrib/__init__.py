"""Integrations with optional libraries, one per file."""
