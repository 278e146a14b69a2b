"""What a program holds: producers, consumers, transactions, groups."""
