"""How the operator's admin writes dates: short, and sorted as they read."""
