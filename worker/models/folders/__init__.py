"""A folder of weights that a job starts from: its files, the names in them, and what is missing."""
