"""autoptd."""
