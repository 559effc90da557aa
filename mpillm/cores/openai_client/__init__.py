"""A streaming client of any OpenAI-compatible server, and the cores that are such clients.

From the socket up: `http_connection` (HTTP/1.1), `event_stream` (server-sent events), `dialect` (requests, by
server), `answer` (responses), `client` (endpoints, retries, deadlines), `client_thread` (its event loop),
`client_core` (the base of the cores), `endpoint_core` (the cores, with `endpoint_options` and `statistics`).
"""
