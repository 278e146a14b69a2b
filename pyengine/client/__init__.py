"""The objects that a program uses: producers, consumers, transactions, groups."""
