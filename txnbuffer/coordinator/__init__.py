"""The life of a transaction: sessions and ids, decisions and markers, time-outs, taking over. Pure."""
