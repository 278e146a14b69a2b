"""The files of a store. This package does not depend on other processes or on shared memory."""
