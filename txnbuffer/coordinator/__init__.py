"""The life of a transaction: sessions and ids, decisions and markers, timeouts, taking over. Pure."""
