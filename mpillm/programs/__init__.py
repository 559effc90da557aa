"""Programs that a run may start: servers, and load clients that replace LoadGen."""
