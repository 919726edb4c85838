"""A pair of nodes that hold one embedded log: a live, a backup that follows it, and a lock outside, pure"""
