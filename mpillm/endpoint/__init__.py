"""An OpenAI-compatible HTTP endpoint in the harness's place: HTTP in a thread, MPI in the main thread."""
