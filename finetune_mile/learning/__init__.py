"""The method: phases, targets, losses, roles, and the one loop that plays them."""
