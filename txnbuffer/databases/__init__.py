"""One commit for a database and the messages: an outbox and an inbox in the tables of the application.

It may import `client.path` and what that imports; it uses a client only by its public calls. Nothing outside of it
imports a database library.
"""
