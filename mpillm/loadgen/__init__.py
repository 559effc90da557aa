"""The real LoadGen: its settings, the system under test, its logs."""
