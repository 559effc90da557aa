"""The real LoadGen: its settings, the system under test, and what its logs say."""
