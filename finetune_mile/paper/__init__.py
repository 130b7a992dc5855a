"""What only the paper's tables need. It imports the rest; the rest names its modules as strings only."""
