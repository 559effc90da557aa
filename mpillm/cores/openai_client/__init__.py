"""A streaming client of any OpenAI-compatible server, and the cores that are such clients.

From the socket up: `http_connection` (HTTP/1.1), `dialect` (requests, by server), `answer` (responses, with
server-sent events), `endpoint` (a server), `client` (calls, retries), `client_thread` (the event loop),
`client_core` (the base of the cores), `endpoint_core` (the cores, with `endpoint_options` and `statistics`).
"""
