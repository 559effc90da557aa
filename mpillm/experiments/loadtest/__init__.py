"""Load tests of an endpoint over HTTP: load, figures, console and HTML reports."""
