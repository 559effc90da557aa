"""Communication between ranks: messages, transports, the event loop, the watch, phases, communicators."""
