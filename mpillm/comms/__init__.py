"""What ranks tell each other: messages, tags, transports, the event loop, the watch, phases, communicators."""
