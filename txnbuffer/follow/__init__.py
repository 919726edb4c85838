"""The one way to read the log of a topic: replayed into its buffer, decided in order, sequenced, unpacked to records"""
