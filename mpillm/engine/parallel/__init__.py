"""What the ranks of an instance send each other while they compute."""
