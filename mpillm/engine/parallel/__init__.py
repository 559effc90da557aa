"""How a model is split over ranks, and what the ranks of an instance send each other while they compute."""
