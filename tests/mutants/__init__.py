"""Deliberately wrong engines and wrong testers; each names what must catch it."""
