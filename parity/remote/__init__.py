"""Any OpenAI-compatible server as the subject.

Reading order: `session` (a run from its beginning to its end), `capabilities` (what the server
offers), `subject` (how cases are put to it), `retokenize` (ids where it tells none), `reading`
(what its answers say), `http` with `sse` (how they come), `process` (a server we start).

Lenient about what a server offers, strict about what it says: a field that it refuses is not asked
for again, and an answer that cannot be read ends the run.
"""
