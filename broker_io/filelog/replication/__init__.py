"""A pair of nodes that hold one embedded log: a primary, a backup that follows it, and a lock outside, pure"""
