"""A streaming client of any OpenAI-compatible server, and the cores that are such clients.

From the socket up: `http_connection` (HTTP/1.1), `event_stream` (server-sent events), `dialect` (what a
request says, by server), `answer` (what a response says), `client` (endpoints, retries, deadlines),
`client_thread` (its event loop), `endpoint_core` (the cores).
"""
