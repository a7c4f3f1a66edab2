"""ln_zoo."""
