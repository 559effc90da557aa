"""Load on an endpoint over HTTP, and its figures: rates, latencies, a report, a page."""
