"""Models as files: fetched, converted, and the configuration files that come with them."""
