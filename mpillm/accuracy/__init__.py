"""The accuracy of a run: scores as MLCommons' reference scripts compute them, and the files that a submission needs."""
