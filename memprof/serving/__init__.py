"""What inference engines do with GPU memory when they start: the budget, and the rules of each engine by release."""
