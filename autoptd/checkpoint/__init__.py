"""Training state in one logical form, tied to no plan: written under any, read under any other."""
